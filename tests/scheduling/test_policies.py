"""Policies as the engine asks them, and as users write them."""

from dataclasses import replace

import numpy as np
import pytest

from dspark.core.errors import ConfigError
from dspark.core.sampling import VerificationRule
from dspark.scheduling.parse import POLICY_FORMS, parse_policy
from dspark.scheduling.policies import FixedLength, Policy, RoundView, Threshold, check_rule
from tests.scheduling.models import linear_model

FORMS = f"policies are {POLICY_FORMS}"


def view_of(max_admit: list[int], block_size: int = 7) -> RoundView:
    count = len(max_admit)
    return RoundView(
        step=3,
        requests=tuple(range(count)),
        rounds=(2,) * count,
        block_size=block_size,
        prefill_tokens=0,
        max_admit_R=np.array(max_admit, dtype=np.int64),
        context_R=np.full(count, 10),
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
        (
            "fixd:3",
            7,
            "no policy 'fixd:3'; did you mean 'fixed'? " + FORMS,
        ),
        (
            "xyz",
            7,
            "no policy 'xyz'; " + FORMS,
        ),
        (
            "",
            7,
            "no policy ''; " + FORMS,
        ),
        ("Off", 7, "did you mean 'off'?"),
        ("off:3", 7, "'off' takes no value"),
        ("off:", 7, "'off' takes no value"),
        ("fixed", 7, "needs a whole number of tokens; use fixed:1 to fixed:7"),
        ("fixed:", 7, "needs a whole number of tokens"),
        ("fixed:two", 7, "needs a whole number of tokens"),
        ("fixed:-1", 7, "needs a whole number of tokens"),
        ("fixed:1.5", 7, "needs a whole number of tokens"),
        ("fixed:²", 7, "needs a whole number of tokens"),
        ("fixed:0", 7, "use off, or fixed:1 to fixed:7"),
        ("fixed:9", 7, "more than the drafter's block of 7 tokens; use fixed:1 to fixed:7"),
        ("fixed:3", None, "needs a drafter"),
        ("async", None, "needs a drafter"),
        ("asynch", 7, "did you mean 'async'?"),
        ("threshold", 7, "needs a confidence from 0 to 1, like threshold:0.5"),
        ("threshold:1.5", 7, "needs a confidence from 0 to 1"),
        ("threshold:nan", 7, "needs a confidence from 0 to 1"),
        ("threshold:x", 7, "needs a confidence from 0 to 1"),
        ("early:3", 7, "'early' takes no value but 'forward'"),
        ("marginal:forward", 7, "'marginal' takes no value"),
    ],
)
def test_bad_policies_are_refused(text: str, block_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_policy(text, block_size=block_size)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def parse(text: str, rules: tuple[VerificationRule, ...] = ()) -> Policy:
    return parse_policy(text, block_size=7, rules=rules, cost=linear_model)


def test_a_rule_under_which_a_policy_is_not_lossless_is_refused() -> None:
    check_rule(parse("global"), "coupled")
    with pytest.raises(
        ConfigError, match=r"'global' is not lossless under 'rejection'.*use coupled"
    ):
        parse("global", rules=("rejection",))


@pytest.mark.parametrize(
    "text", ["off", "fixed:2", "threshold:0.3", "early", "async", "marginal", "early:forward"]
)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_every_other_policy_takes_every_rule(text: str, rule: VerificationRule) -> None:
    policy = parse(text, rules=(rule,))
    check_rule(policy, rule)
    assert policy.name == policy.fresh().name == text
    assert type(parse(policy.name)) is type(policy)


@pytest.mark.parametrize("text", ["threshold:0.5", "early", "async", "marginal", "global"])
def test_a_bundle_without_a_confidence_head_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{text}' needs a confidence head.*fixed:1 to fixed:7"):
        parse_policy(text, block_size=7, has_confidence=False, cost=linear_model)
    for other in ("off", "fixed:3"):
        parse_policy(other, block_size=7, has_confidence=False)


@pytest.mark.parametrize("text", ["early", "async", "marginal", "global"])
def test_without_a_cost_table_the_refusal_says_what_to_do(text: str) -> None:
    with pytest.raises(ConfigError, match="run dspark profile"):
        parse_policy(text, block_size=7)


def test_threshold_stops_at_the_first_unsure_position() -> None:
    confidence_RK = np.array([[0.9, 0.4, 0.9], [0.5, 0.5, 0.5], [0.1, 1.0, 1.0], [0.9, 0.9, 0.9]])
    view = replace(view_of([3, 3, 3, 1], block_size=3), confidence_RK=confidence_RK)
    assert Threshold(0.5).admit(view).tolist() == [1, 3, 0, 1]
    assert Threshold(0.0).admit(view).tolist() == [3, 3, 3, 1]
    assert Threshold(0.5).admit(view_of([3, 3])).tolist() == [0, 0]


def test_a_view_of_the_wrong_shape_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        RoundView(
            step=0,
            requests=(1, 2),
            rounds=(0, 0),
            block_size=3,
            prefill_tokens=0,
            max_admit_R=np.array([3, 3]),
            context_R=np.array([9, 9]),
            survival_RK=np.zeros((2, 4)),
        )
