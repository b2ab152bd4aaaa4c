"""What a whole step costs on one machine, context included: the fitted form of a profile.

    forward(B, R, C) = tokens(B) + requests(R) + per_context * C + per_pair * B * C / R
    rest(B, R)       = tokens(B) + requests(R)          sampling, bookkeeping, context capture
    draft(n, L, C)   = tokens(n * L) + requests(n) + per_context * C * n / R

of B tokens, R requests, n of which draft L slots, and C cached tokens of all of them together. Keys
and values are read once a request (C) and meet every query (B * C / R, where all contexts are
alike); the engines' cost tables leave both out. Nothing of a plain step overlaps, so its parts add
up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dspark.scheduling.arrays import FloatArray, NumberArray
from dspark.scheduling.cost import SpsCurve

Sps = Callable[[npt.ArrayLike], NumberArray]
"""Steps per second at each of some batch sizes, in tokens: SPS(B) of one round."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Seconds by a count, from 0 on; linear beyond the last one that is known."""

    seconds: FloatArray
    """Of counts 0, 1, 2, ...: never falling."""
    slope: float
    """Seconds for each count beyond them, at least 0."""

    def __call__(self, counts: npt.ArrayLike) -> FloatArray:
        last = len(self.seconds) - 1
        counts = np.asarray(counts)
        known: FloatArray = self.seconds.take(counts, mode="clip")
        beyond = counts - last
        return known + self.slope * np.maximum(beyond, 0) if (beyond > 0).any() else known

    def __add__(self, other: "Curve") -> "Curve":
        counts = np.arange(max(len(self.seconds), len(other.seconds)))
        return Curve(self(counts) + other(counts), self.slope + other.slope)


@dataclass(frozen=True, slots=True, eq=False)
class PartCost:
    """One part of a step; see the module text."""

    tokens: Curve
    requests: Curve
    per_context: float = 0.0
    per_pair: float = 0.0

    def seconds(
        self, batch_tokens: npt.ArrayLike, requests: int, context_tokens: float
    ) -> FloatArray:
        pair = self.per_pair * context_tokens / max(requests, 1)
        fixed = float(self.requests(requests)) + self.per_context * context_tokens
        return self.tokens(batch_tokens) + (fixed + pair * np.asarray(batch_tokens))

    def __add__(self, other: "PartCost") -> "PartCost":
        return PartCost(
            self.tokens + other.tokens,
            self.requests + other.requests,
            self.per_context + other.per_context,
            self.per_pair + other.per_pair,
        )


@dataclass(frozen=True, slots=True, eq=False)
class CostModel:
    forward: PartCost
    """The target's forward."""
    rest: PartCost
    """What else a step without a draft takes."""
    draft: PartCost
    """`tokens` counts slots here, and `requests` those that draft. One length only: by `requests`
    alone."""
    lengths: tuple[int, ...] = ()
    """Of drafts that were measured, ascending; a gate chooses among them."""
    _whole: PartCost = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_whole", self.forward + self.rest)

    def step_seconds(
        self, batch_tokens: npt.ArrayLike, *, requests: int, context_tokens: float
    ) -> FloatArray:
        """Seconds of a step without its draft, at each of `batch_tokens`."""
        return self._whole.seconds(batch_tokens, requests, context_tokens)

    @property
    def pair_seconds(self) -> float:
        """Seconds of a query that meets one more cached token."""
        return self._whole.per_pair

    def draft_seconds(
        self, drafting: int, *, length: int, requests: int, context_tokens: float
    ) -> float:
        """Seconds of drafting `length` slots for `drafting` of `requests`; 0 for none."""
        if drafting == 0:
            return 0.0
        share = context_tokens * drafting / max(requests, 1)
        return float(self.draft.seconds(drafting * length, drafting, share))

    def round_sps(self, *, requests: int, drafting: int, length: int, context_tokens: float) -> Sps:
        """SPS(B) of a round with these requests, the whole step counted, draft included."""
        draft = self.draft_seconds(
            drafting, length=length, requests=requests, context_tokens=context_tokens
        )

        def sps(batch_tokens: npt.ArrayLike) -> NumberArray:
            seconds = self.step_seconds(
                batch_tokens, requests=requests, context_tokens=context_tokens
            )
            rates: FloatArray = 1.0 / (seconds + draft)
            return rates

        return sps


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Prices a step as the paper's SPS(B) does: by the target's forward alone (section 3.2.2)."""

    model: CostModel

    def round_sps(self, *, requests: int, drafting: int, length: int, context_tokens: float) -> Sps:
        def sps(batch_tokens: npt.ArrayLike) -> NumberArray:
            rates: FloatArray = 1.0 / self.model.forward.seconds(
                batch_tokens, requests, context_tokens
            )
            return rates

        return sps


@dataclass(frozen=True, slots=True)
class CurveCost:
    """Prices every round by one curve of batch tokens, whoever is in it."""

    curve: SpsCurve

    def round_sps(self, *, requests: int, drafting: int, length: int, context_tokens: float) -> Sps:
        return self.curve
