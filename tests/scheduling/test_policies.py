"""Policies as the engine asks them, and as users write them."""

from dataclasses import dataclass

import numpy as np
import pytest

from dspark.core.errors import ConfigError
from dspark.core.sampling import VerificationRule
from dspark.scheduling.policies import FixedLength, Off, RoundView, check_rule, parse_policy


def view_of(max_admit: list[int], block_size: int = 7) -> RoundView:
    count = len(max_admit)
    return RoundView(
        step=3,
        requests=tuple(range(count)),
        rounds=(2,) * count,
        block_size=block_size,
        prefill_tokens=0,
        max_admit_R=np.array(max_admit, dtype=np.int64),
    )


def test_off_never_drafts() -> None:
    policy = parse_policy("off", block_size=None)
    view = view_of([7, 3])
    assert not policy.drafts
    assert policy.wants_draft(view).tolist() == [False, False]
    assert policy.admit(view).tolist() == [0, 0]


def test_fixed_admits_its_length_where_there_is_room() -> None:
    policy = parse_policy("fixed:4", block_size=7)
    view = view_of([7, 3, 0, 4])
    assert policy.drafts
    assert policy.wants_draft(view).tolist() == [True, True, False, True]
    assert policy.admit(view).tolist() == [4, 3, 0, 4]


@pytest.mark.parametrize("text", ["off", "fixed:1", "fixed:7"])
def test_a_policys_name_parses_to_itself(text: str) -> None:
    policy = parse_policy(text, block_size=7)
    assert policy.name == text
    assert parse_policy(policy.name, block_size=7) == policy


def test_surrounding_space_is_forgiven() -> None:
    assert parse_policy(" fixed:7 ", block_size=7) == FixedLength(7)


@pytest.mark.parametrize(
    ("text", "block_size", "message"),
    [
        ("fixd:3", 7, "no policy 'fixd:3'; did you mean 'fixed'? policies are off, fixed:N"),
        ("xyz", 7, "no policy 'xyz'; policies are off, fixed:N"),
        ("", 7, "no policy ''; policies are off, fixed:N"),
        ("Off", 7, "did you mean 'off'?"),
        ("off:3", 7, "'off' takes no value"),
        ("off:", 7, "'off' takes no value"),
        ("fixed", 7, "needs a whole number of tokens: fixed:1 to fixed:7"),
        ("fixed:", 7, "needs a whole number of tokens"),
        ("fixed:two", 7, "needs a whole number of tokens"),
        ("fixed:-1", 7, "needs a whole number of tokens"),
        ("fixed:1.5", 7, "needs a whole number of tokens"),
        ("fixed:²", 7, "needs a whole number of tokens"),
        ("fixed:0", 7, "use off, or fixed:1 to fixed:7"),
        ("fixed:9", 7, "more than the drafter's block of 7 tokens; use fixed:1 to fixed:7"),
        ("fixed:3", None, "needs a drafter"),
    ],
)
def test_bad_policies_are_refused(text: str, block_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_policy(text, block_size=block_size)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@dataclass(frozen=True)
class CoupledOnly(Off):
    """As a same-round global search will be."""

    name = "global"
    rules: frozenset[VerificationRule] = frozenset({"coupled"})


def test_a_rule_under_which_a_policy_is_not_lossless_is_refused() -> None:
    check_rule(CoupledOnly(), "coupled")
    with pytest.raises(
        ConfigError, match=r"'global' is not lossless under 'rejection'.*use coupled"
    ):
        check_rule(CoupledOnly(), "rejection")


@pytest.mark.parametrize("text", ["off", "fixed:2"])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_value_blind_policies_take_every_rule(text: str, rule: VerificationRule) -> None:
    check_rule(parse_policy(text, block_size=7, rules=[rule]), rule)


def test_a_view_of_the_wrong_shape_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        RoundView(
            step=0,
            requests=(1, 2),
            rounds=(0, 0),
            block_size=3,
            prefill_tokens=0,
            max_admit_R=np.array([3, 3]),
            survival_RK=np.zeros((2, 4)),
        )
