"""The policy interface, and the policies that look at no confidence.

A policy decides who gets a draft in a round, and how much of it is verified.

The engine asks a policy before anything is drafted (`wants_draft`, `draft_length`) and after
(`admit`).
Everything a policy may know is in the `RoundView`; nothing in it is a draft token. A policy lists
the verification rules under which it is lossless; `check_rule` refuses a request under any other.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from dspark.core.errors import ConfigError
from dspark.core.records import StepRecord
from dspark.core.sampling import RULES, VerificationRule
from dspark.scheduling.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundView:
    """What is known about one round of the batch. Rows are the R requests that decode in it."""

    step: int
    """The engine's step; rises by one a round of the batch."""
    requests: tuple[int, ...]
    """Request ids, never used again for another request."""
    rounds: tuple[int, ...]
    """Each request's own round number, abandoned rounds included."""
    block_size: int
    prefill_tokens: int
    """Prompt tokens in the same step (P)."""
    max_admit_R: IntArray
    """The most draft tokens each request may have verified (0 .. block_size): what its
    max_new_tokens and its context leave room for; after drafting, 0 for a request that has no
    draft. Never decided by looking at the draft."""
    context_R: IntArray
    """Tokens that each request has in the cache."""
    confidence_RK: FloatArray | None = None
    """Conditional confidence, uncalibrated; None before drafting and without a confidence head."""
    draft_length: int | None = None
    """Slots of the round's draft; None: a whole block, or not drafted yet."""
    survival_RK: FloatArray | None = None
    """Survival of the calibrated confidence; None before drafting and without a confidence head.
    Rows of requests without a draft, and slots behind `draft_length`, mean nothing: `max_admit_R`
    leaves them out."""

    def __post_init__(self) -> None:
        count = len(self.requests)
        assert len(self.rounds) == count
        assert self.max_admit_R.shape == self.context_R.shape == (count,)
        for values_RK in (self.confidence_RK, self.survival_RK):
            assert values_RK is None or values_RK.shape == (count, self.block_size)


class Policy(Protocol):
    """Decides verification lengths. `admit` and `observe` may feed state kept between rounds, by
    request id, never by place in the batch: a new request inherits nothing."""

    @property
    def name(self) -> str:
        """As the user writes it: `parse_policy(policy.name, ...)` gives the policy again."""
        ...

    @property
    def drafts(self) -> bool:
        """False when it never drafts: no drafter need be loaded, no features captured."""
        ...

    @property
    def rules(self) -> frozenset[VerificationRule]:
        """The verification rules under which it is lossless."""
        ...

    @property
    def longest(self) -> int | None:
        """The most it will ever admit for a request, so that no more is drafted; None: a block."""
        ...

    @property
    def reads_survival(self) -> bool:
        """Whether it weighs calibrated confidences, so that it matters which calibration serves."""
        ...

    def wants_draft(self, view: RoundView) -> BoolArray:
        """Which requests [R] to draft for. Called before drafting: survival is None."""
        ...

    def draft_length(self, view: RoundView) -> int:
        """How many slots to draft for those requests, 1 .. block_size. Called after `wants_draft`,
        of the same view, where anybody wants one."""
        ...

    def admit(self, view: RoundView) -> IntArray:
        """Draft tokens to verify [R], between 0 and `max_admit_R`, always a prefix of the block.

        Called once a round, also when the view holds no draft.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Told of every step when it is over: times, offered and accepted tokens."""
        ...

    def fresh(self) -> "Policy":
        """The same policy as on its first day. Every engine takes one of its own: request ids are
        unique in one engine only."""
        ...


@dataclass(frozen=True, slots=True)
class Off:
    """Plain decoding."""

    name: ClassVar[str] = "off"
    drafts: ClassVar[bool] = False
    longest: ClassVar[int | None] = None
    rules: ClassVar[frozenset[VerificationRule]] = frozenset(RULES)
    reads_survival: ClassVar[bool] = False

    def wants_draft(self, view: RoundView) -> BoolArray:
        return np.zeros(len(view.requests), dtype=np.bool_)

    def draft_length(self, view: RoundView) -> int:
        return view.block_size

    def admit(self, view: RoundView) -> IntArray:
        return np.zeros(len(view.requests), dtype=np.int64)

    def observe(self, record: StepRecord) -> None:
        """Keeps no state."""

    def fresh(self) -> "Policy":
        return self


@dataclass(frozen=True, slots=True)
class FixedLength:
    """The first `length` draft tokens of every request, whatever their confidence."""

    length: int
    drafts: ClassVar[bool] = True
    rules: ClassVar[frozenset[VerificationRule]] = frozenset(RULES)
    reads_survival: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"fixed:{self.length}"

    @property
    def longest(self) -> int | None:
        return self.length

    def wants_draft(self, view: RoundView) -> BoolArray:
        return view.max_admit_R > 0

    def draft_length(self, view: RoundView) -> int:
        return view.block_size

    def admit(self, view: RoundView) -> IntArray:
        return np.minimum(self.length, view.max_admit_R)

    def observe(self, record: StepRecord) -> None:
        """Keeps no state."""

    def fresh(self) -> "Policy":
        return self


@dataclass(frozen=True, slots=True)
class Threshold:
    """Draft tokens up to the first whose own raw confidence is below `least` (paper, figure 5).

    The confidence at a position reads the token before it, so a position is settled before its own
    token matters: lossless under `rejection`.
    """

    least: float
    drafts: ClassVar[bool] = True
    longest: ClassVar[int | None] = None
    rules: ClassVar[frozenset[VerificationRule]] = frozenset(RULES)
    reads_survival: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"threshold:{self.least:g}"

    def wants_draft(self, view: RoundView) -> BoolArray:
        return view.max_admit_R > 0

    def draft_length(self, view: RoundView) -> int:
        return view.block_size

    def admit(self, view: RoundView) -> IntArray:
        if view.confidence_RK is None:
            return np.zeros(len(view.requests), dtype=np.int64)
        sure_RK = view.confidence_RK >= self.least
        lengths: IntArray = np.cumprod(sure_RK, axis=1, dtype=np.int64).sum(axis=1)
        return np.minimum(lengths, view.max_admit_R)

    def observe(self, record: StepRecord) -> None:
        """Keeps no state."""

    def fresh(self) -> "Policy":
        return self


def check_rule(policy: Policy, rule: VerificationRule) -> None:
    """Raises ConfigError when `policy` is not lossless under `rule`."""
    if rule not in policy.rules:
        raise ConfigError(
            f"policy {policy.name!r} is not lossless under {rule!r} verification; "
            f"use {' or '.join(sorted(policy.rules))}, or another policy"
        )
