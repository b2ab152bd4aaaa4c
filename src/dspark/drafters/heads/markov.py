"""The sequential head: how the token before a slot shifts the slot's logits."""

from torch import Tensor, nn
from torch.nn import functional as F


class MarkovHead(nn.Module):
    """Vanilla Markov head (paper, equation 5): bias = W2 W1[previous token], of rank r.

    W1 is stored as rows of an embedding and W2 as [V, r]; neither touches the hidden state, so a
    draft step costs one gather and one thin product.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """W1 rows [..., r] of the previous tokens [...]."""
        return self.markov_w1(previous)

    def bias(self, embedded: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Logit bias [..., V] of embedded previous tokens [..., r], or only columns `token_ids`."""
        weight = self.markov_w2.weight if token_ids is None else self.markov_w2.weight[token_ids]
        return F.linear(embedded, weight)
