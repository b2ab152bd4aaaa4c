"""Policies as users write them."""

import difflib
from collections.abc import Callable, Iterable, Sequence

from dspark.core.errors import ConfigError
from dspark.core.sampling import VerificationRule
from dspark.scheduling.by_confidence import Async, ByConfidence, Early, Global, Marginal
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.policies import FixedLength, Off, Policy, Threshold, check_rule

POLICY_FORMS = "off, fixed:N, threshold:X, early, async, marginal, global"
"""How the policies are written, for help texts and errors."""

_BY_COST: dict[str, type[ByConfidence]] = {
    policy.form: policy for policy in (Early, Async, Marginal, Global)
}
_NAMES = ["off", "fixed", "threshold", *_BY_COST]

CostSource = Callable[[], CostModel | None]
"""Asked for only by a policy that needs it; None where the machine has no table."""


def needs_cost(text: str) -> bool:
    """Whether the policy that `text` names weighs cost, and so needs a table of this machine."""
    return text.strip().partition(":")[0] in _BY_COST


def parse_policy(
    text: str,
    *,
    block_size: int | None,
    rules: Iterable[VerificationRule] = (),
    has_confidence: bool = True,
    cost: CostSource = lambda: None,
    expected_K: Sequence[float] | None = None,
) -> Policy:
    """The policy that `text` names, see `POLICY_FORMS`.

    block_size: the drafter's; None when there is no drafter.
    rules: the verification rules that requests may come with.
    has_confidence: whether the drafter has a confidence head.
    expected_K: survival of a request that nothing is known of yet, by position, from calibration.

    Raises ConfigError for a name or value that does not exist, for a policy that drafts where there
    is no drafter, that needs a confidence head or a cost table where there is none, and for one
    that is not lossless under one of `rules`.
    """
    name, value = _split(text)
    if name != "off" and block_size is None:
        raise ConfigError(f"policy {text!r} needs a drafter; give one with --draft, or use off")
    policy = _without_cost(text, name, value, block_size, has_confidence)
    if policy is None:
        assert block_size is not None
        policy = _by_cost(text, name, value, block_size, cost, expected_K)
    for rule in rules:
        check_rule(policy, rule)
    return policy


def check_form(text: str, *, block_size: int | None = None, has_confidence: bool = True) -> None:
    """Raises ConfigError for what is no policy of such a drafter, whatever steps cost: before one
    is loaded. block_size: None where it is not known yet."""
    _without_cost(text, *_split(text), block_size, has_confidence)


def _split(text: str) -> tuple[str, str | None]:
    """Name and value; ConfigError for a name that does not exist."""
    name, colon, value = text.strip().partition(":")
    if name not in _NAMES:
        near = difflib.get_close_matches(name, _NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"there is no policy {text!r}; {hint}policies are {POLICY_FORMS}")
    return name, value if colon else None


def _without_cost(
    text: str, name: str, value: str | None, block_size: int | None, has_confidence: bool
) -> Policy | None:
    """None for a policy that weighs cost. block_size: None where it is not known yet."""
    if name == "off":
        if value is not None:
            raise ConfigError(f"policy {text!r}: 'off' takes no value; write off")
        return Off()
    if name == "fixed":
        return _parse_fixed(text, value, block_size)
    if not has_confidence:
        raise ConfigError(
            f"policy {text!r} needs a confidence head, which this drafter lacks; "
            f"use {_fixed_lengths(block_size)}, or off"
        )
    if name == "threshold":
        return _parse_threshold(text, value)
    if value not in (None, "forward"):
        raise ConfigError(
            f"policy {text!r}: {name!r} takes no value but 'forward' (cost of the target's forward "
            f"alone); write {name} or {name}:forward"
        )
    if name == "marginal" and value is not None:
        raise ConfigError(f"policy {text!r}: 'marginal' takes no value; write marginal")
    return None


def _by_cost(
    text: str,
    name: str,
    value: str | None,
    block_size: int,
    cost: CostSource,
    expected_K: Sequence[float] | None,
) -> Policy:
    model = cost()
    if model is None:
        raise ConfigError(
            f"policy {text!r} needs a cost table of this machine, target and drafter; "
            f"run dspark profile, or use {_fixed_lengths(block_size)}, threshold:X or off"
        )
    return _BY_COST[name].gated(model, forward_only=value is not None, expected_K=expected_K)


def _fixed_lengths(block_size: int | None) -> str:
    """What a user may write; block_size: None where it is not known yet."""
    if block_size is None:
        return "a length like fixed:3, at most the drafter's block"
    return f"fixed:1 to fixed:{block_size}"


def _parse_fixed(text: str, value: str | None, block_size: int | None) -> Policy:
    allowed = _fixed_lengths(block_size)
    if value is None or not (value.isascii() and value.isdigit()):
        raise ConfigError(f"policy {text!r}: 'fixed' needs a whole number of tokens; use {allowed}")
    length = int(value)
    if length == 0:
        raise ConfigError(f"policy {text!r} would draft and verify nothing; use off, or {allowed}")
    if block_size is not None and length > block_size:
        raise ConfigError(
            f"policy {text!r} asks for more than the drafter's block of {block_size} tokens; "
            f"use {allowed}"
        )
    return FixedLength(length)


def _parse_threshold(text: str, value: str | None) -> Policy:
    try:
        least = float(value) if value is not None else -1.0
    except ValueError:
        least = -1.0
    if not 0.0 <= least <= 1.0:  # NaN compares false
        raise ConfigError(
            f"policy {text!r}: 'threshold' needs a confidence from 0 to 1, like threshold:0.5"
        )
    return Threshold(least)
