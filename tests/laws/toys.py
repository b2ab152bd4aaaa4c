"""A target and a drafter small enough to enumerate: next-token tables that depend on all before."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

Text = tuple[int, ...]

_TARGET, _DRAFT, _CONFIDENCE = 1, 2, 3


@dataclass(frozen=True)
class Toy:
    """One request's models. Everything is float64 and a function of (seed, tokens before)."""

    vocab: int
    block: int
    seed: int
    candidates: int | None = None
    """Candidates per draft slot, the best by logit; None is the whole vocabulary."""
    confidences: tuple[float, ...] = (0.95, 0.6)
    """What the confidence head may say; few values, so that scheduler states meet again."""
    forbid: bool = False
    """A grammar forbids the target one token after every text."""
    forbid_draft: bool = False
    """The drafter knows the grammar, too."""

    @cache  # noqa: B019 - a few toys live as long as a test run
    def target_logits(self, text: Text) -> Tensor:
        """[V]"""
        logits = 1.5 * torch.from_numpy(self._random(_TARGET, text).normal(size=self.vocab))
        if self.forbid:
            logits[self.forbidden(text)] = -torch.inf
        return logits

    def forbidden(self, text: Text) -> int:
        return (sum(text) + len(text)) % self.vocab

    @cache  # noqa: B019
    def draft_slot(self, text: Text, drafted: Text) -> tuple[Tensor, Tensor]:
        """Candidate token ids [C] and their logits [C] of the slot after the tokens drafted."""
        logits = torch.from_numpy(self._random(_DRAFT, text + drafted).normal(size=self.vocab))
        # The block's length of drafting matters too, as it does to a drafter with stale context.
        logits = logits + 0.5 * len(drafted) * torch.linspace(-1, 1, self.vocab, dtype=logits.dtype)
        if self.forbid_draft:
            logits[self.forbidden(text + drafted)] = -torch.inf
        best = logits.topk(self.candidates or self.vocab)
        return best.indices, best.values

    def confidence(self, text: Text, drafted: Text) -> float:
        """Conditional confidence of the slot after the tokens drafted."""
        return float(self._random(_CONFIDENCE, text + drafted).choice(self.confidences))

    @cache  # noqa: B019
    def survival(self, text: Text, drafted: Text) -> tuple[float, ...]:
        """Survival of every slot of a drafted block."""
        given = [self.confidence(text, drafted[:slot]) for slot in range(self.block)]
        return tuple(np.cumprod(given).tolist())

    def _random(self, table: int, tokens: Text) -> np.random.Generator:
        # numpy's seeds ignore trailing zeros, so token 0 must not be 0.
        return np.random.default_rng([self.seed, table, *(token + 1 for token in tokens)])
