"""Policies: who gets a draft in a round, and how much of it is verified.

The engine asks a policy twice a round: `wants_draft` before anything is drafted, `admit` after.
Everything a policy may know is in the `RoundView`; nothing in it is a draft token. A policy lists
the verification rules under which it is lossless; `check_rule` refuses a request under any other.
"""

import difflib
from collections.abc import Iterable
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
    confidence_RK: FloatArray | None = None
    """Conditional confidence, uncalibrated; None before drafting and without a confidence head."""
    survival_RK: FloatArray | None = None
    """Survival of the calibrated confidence; None before drafting and without a confidence head.
    Rows of requests without a draft hold zeros."""

    def __post_init__(self) -> None:
        count = len(self.requests)
        assert len(self.rounds) == count
        assert self.max_admit_R.shape == (count,)
        for values_RK in (self.confidence_RK, self.survival_RK):
            assert values_RK is None or values_RK.shape == (count, self.block_size)


class Policy(Protocol):
    """Decides verification lengths. `admit` and `observe` may feed state kept between rounds."""

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

    def wants_draft(self, view: RoundView) -> BoolArray:
        """Which requests [R] to draft for. Called before drafting: survival is None."""
        ...

    def admit(self, view: RoundView) -> IntArray:
        """Draft tokens to verify [R], between 0 and `max_admit_R`, always a prefix of the block.

        Called once a round, also when the view holds no draft.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Told of every step when it is over: times, offered and accepted tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Off:
    """Plain decoding."""

    name: ClassVar[str] = "off"
    drafts: ClassVar[bool] = False
    rules: ClassVar[frozenset[VerificationRule]] = frozenset(RULES)

    def wants_draft(self, view: RoundView) -> BoolArray:
        return np.zeros(len(view.requests), dtype=np.bool_)

    def admit(self, view: RoundView) -> IntArray:
        return np.zeros(len(view.requests), dtype=np.int64)

    def observe(self, record: StepRecord) -> None:
        """Keeps no state."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """The first `length` draft tokens of every request, whatever their confidence."""

    length: int
    drafts: ClassVar[bool] = True
    rules: ClassVar[frozenset[VerificationRule]] = frozenset(RULES)

    @property
    def name(self) -> str:
        return f"fixed:{self.length}"

    def wants_draft(self, view: RoundView) -> BoolArray:
        return view.max_admit_R > 0

    def admit(self, view: RoundView) -> IntArray:
        return np.minimum(self.length, view.max_admit_R)

    def observe(self, record: StepRecord) -> None:
        """Keeps no state."""


def parse_policy(
    text: str, *, block_size: int | None, rules: Iterable[VerificationRule] = RULES
) -> Policy:
    """The policy that `text` names: `off` or `fixed:N`.

    block_size: the drafter's; None when there is no drafter.
    rules: the verification rules that requests may come with.

    Raises ConfigError for a name or value that does not exist, for a policy that drafts where there
    is no drafter, and for one that is not lossless under one of `rules`.
    """
    name, colon, value = text.strip().partition(":")
    if name not in _PARSERS:
        near = difflib.get_close_matches(name, _PARSERS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"there is no policy {text!r}; {hint}policies are {POLICY_FORMS}")
    policy = _PARSERS[name](text, value if colon else None, block_size)
    for rule in rules:
        check_rule(policy, rule)
    return policy


def check_rule(policy: Policy, rule: VerificationRule) -> None:
    """Raises ConfigError when `policy` is not lossless under `rule`."""
    if rule not in policy.rules:
        raise ConfigError(
            f"policy {policy.name!r} is not lossless under {rule!r} verification; "
            f"use {' or '.join(sorted(policy.rules))}, or another policy"
        )


def _parse_off(text: str, value: str | None, block_size: int | None) -> Policy:
    if value is not None:
        raise ConfigError(f"policy {text!r}: 'off' takes no value; write off")
    return Off()


def _parse_fixed(text: str, value: str | None, block_size: int | None) -> Policy:
    if block_size is None:
        raise ConfigError(f"policy {text!r} needs a drafter; give one with --draft, or use off")
    allowed = f"fixed:1 to fixed:{block_size}"
    if value is None or not (value.isascii() and value.isdigit()):
        raise ConfigError(f"policy {text!r}: 'fixed' needs a whole number of tokens: {allowed}")
    length = int(value)
    if length == 0:
        raise ConfigError(f"policy {text!r} would draft and verify nothing; use off, or {allowed}")
    if length > block_size:
        raise ConfigError(
            f"policy {text!r} asks for more than the drafter's block of {block_size} tokens; "
            f"use {allowed}"
        )
    return FixedLength(length)


_PARSERS = {"off": _parse_off, "fixed": _parse_fixed}
POLICY_FORMS = "off, fixed:N"
"""How the policies are written, for help texts and errors."""
