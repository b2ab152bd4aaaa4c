"""The confidence head: how likely a slot's token is to be accepted, given the ones before it."""

import torch
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """logit_k = w . [h_k ; W1[x_{k-1}]] + b (paper, equation 7; checkpoints have a bias).

    It reads the previous token and never x_k, so cutting a draft by it anticipates nothing (law 2).
    """

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        """`markov_rank` 0 leaves the Markov feature out."""
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, embedded_previous: Tensor | None) -> Tensor:
        """Raw logits [...] of final-normed hidden states [..., D] and W1 rows [..., r]."""
        if embedded_previous is not None:
            hidden = torch.cat([hidden, embedded_previous], -1)
        return self.proj(hidden).squeeze(-1)
