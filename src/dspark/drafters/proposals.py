"""The tokens that may be proposed, their base logits, the draw, and its entropy."""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.drafters.candidates import top_candidates
from dspark.drafters.fused import LinearFactory
from dspark.nn.binding import finish_logits
from dspark.nn.sampling import SamplingRows, probs_from_logits, race
from dspark.nn.seams import Binding, DraftAdjust, DraftNoise


class Proposals(NamedTuple):
    """What the backbone says before the first token is drawn."""

    hidden_RKD: Tensor
    """After the final norm."""
    base_RKC: Tensor
    """Logits of the candidates without the sequential head's bias."""
    ids_RKC: Tensor
    """int64 token ids of the candidates."""
    columns_RKC: Tensor | None
    """int64 columns of the candidates in the draft vocabulary; None: all of them, in order."""


class Drawn(NamedTuple):
    """What the sequential loop leaves: parts of a `DraftBlock`, by the same names."""

    tokens_RK: Tensor
    probs_RKC: Tensor
    confidence_RK: Tensor | None = None
    entropy_RK: Tensor | None = None


class ProposalHead:
    """The target's LM head over the draft vocabulary, cut to the best candidates of each row."""

    def __init__(
        self,
        binding: Binding,
        candidates: int,
        draft_token_ids: Tensor | None,
        linear_factory: LinearFactory,
    ) -> None:
        head = binding.lm_head_VD
        self._binding = binding
        self.token_ids = torch.arange(len(head), device=head.device)
        if draft_token_ids is not None:
            self.token_ids = draft_token_ids.to(head.device)
            head = head[self.token_ids]
        self._head = linear_factory(head)
        self._count = min(candidates, len(self.token_ids)) or len(self.token_ids)

    def __call__(self, hidden_MD: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Base logits [M, C] of hidden states after the final norm, their columns in the draft
        vocabulary [M, C] (None: all of them, in order) and their token ids [M, C]."""
        logits = finish_logits(self._binding, self._head(hidden_MD))
        if self._count == len(self.token_ids):
            return logits, None, self.token_ids.expand(len(logits), -1)
        values, columns = top_candidates(logits, self._count)
        return values, columns, self.token_ids[columns]


def draw(
    logits_RC: Tensor,
    ids_RC: Tensor,
    rows: SamplingRows,
    noise: DraftNoise,
    drafted_Rk: Tensor,
    adjust: DraftAdjust | None,
) -> tuple[Tensor, Tensor]:
    """(float64 probabilities [R, C] of the candidates, token ids [R] drawn from exactly those).

    The slot comes after the tokens drafted so far, k of them; `adjust` is `Drafter.draft`'s.
    """
    logits_RC = logits_RC.double()
    if adjust is not None:
        logits_RC = adjust(drafted_Rk, ids_RC, logits_RC)
    probs_RC = probs_from_logits(logits_RC, rows)
    winners_R = race(probs_RC, noise(drafted_Rk.shape[1], ids_RC))
    return probs_RC, ids_RC.gather(1, winners_R[:, None])[:, 0]


def entropy(logits: Tensor) -> Tensor:
    """Entropy [...] in nats, float32, of the softmax of logits [..., C]."""
    return torch.special.entr(logits.float().softmax(-1)).sum(-1)
