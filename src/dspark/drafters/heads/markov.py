"""The sequential heads: how the tokens before a slot shift the slot's logits.

Every head makes a latent of width r out of what it may know, and the bias is W2 latent. So training
and drafting differ only in where the latent comes from, and the vocabulary is met in one place.
Tensor names are DeepSpec's.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """Vanilla Markov head (paper, equation 5): the latent is W1[previous token].

    W1 is stored as rows of an embedding and W2 as [V, r]; neither touches the hidden state, so a
    draft step costs one gather and one thin product.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    @property
    def rank(self) -> int:
        return self.markov_w1.embedding_dim

    def embed(self, previous: Tensor) -> Tensor:
        """W1 rows [..., r] of the previous tokens [...]."""
        return self.markov_w1(previous)

    def step(
        self, state: Tensor | None, embedded: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Latent [..., r] of one slot, and the state for the next slot.

        From the state that the slot before left (None at slot 0), W1 rows [..., r] of the token
        before, and the slot's hidden state [..., D] after the final norm.
        """
        return embedded, state

    def latents(self, hidden_AKD: Tensor, previous_AK: Tensor) -> Tensor:
        """Latents [A, K, r] of whole blocks with known tokens: what training needs."""
        embedded_AKr = self.embed(previous_AK)
        state: Tensor | None = None
        latents = []
        for k in range(hidden_AKD.shape[1]):
            latent, state = self.step(state, embedded_AKr[:, k], hidden_AKD[:, k])
            latents.append(latent)
        return torch.stack(latents, 1)

    def bias(self, latent: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Logit bias [..., V] of latents [..., r], or only columns `token_ids`."""
        weight = self.markov_w2.weight if token_ids is None else self.markov_w2.weight[token_ids]
        return F.linear(latent, weight)


class GatedMarkovHead(MarkovHead):
    """The latent is gated by the hidden state: sigmoid(G [h ; e] + b) * e (DeepSpec's code)."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(
        self, state: Tensor | None, embedded: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        gate = self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid()
        return gate * embedded, state


class RnnHead(MarkovHead):
    """A recurrent state carries all earlier tokens of the block (paper, equation 6).

    z = [s ; e ; h]; s' = sigmoid(W_g z) s + (1 - sigmoid(W_g z)) tanh(W_c z); the latent is
    tanh(W_o z), of the state before this step. The state starts at zero with every block.
    DeepSpec has biases where the paper has none.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(
        self, state: Tensor | None, embedded: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if state is None:
            state = torch.zeros_like(embedded)
        joint = self.joint_proj(torch.cat([state, embedded, hidden], -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1.0 - gate) * candidate.tanh()


def make_head(kind: str, vocab_size: int, rank: int, hidden_size: int) -> MarkovHead:
    """The head of that `markov_head_type`."""
    assert kind in KINDS, kind
    if kind == "gated":
        return GatedMarkovHead(vocab_size, rank, hidden_size)
    if kind == "rnn":
        return RnnHead(vocab_size, rank, hidden_size)
    return MarkovHead(vocab_size, rank)
