"""Definitions of DESIGN section 6 on records whose statistics are worked out by hand."""

import pytest

from dspark.evaluation.acceptance import measure_acceptance
from tests.evaluation.records import round_record


def test_every_statistic_by_hand() -> None:
    measured = measure_acceptance(
        [
            round_record(4, 4),  # all accepted, and a bonus: 5 tokens
            round_record(4, 1),  # rejected at position 2: 2 tokens
            round_record(4, 0),  # rejected at once: 1 token
            round_record(2, 2),  # a short offer, all accepted: 3 tokens
        ]
    )
    assert measured.rounds == 4
    assert measured.accepted_length == (5 + 2 + 1 + 3) / 4
    assert measured.acceptance_rate == 7 / 14
    assert measured.figure5_rate == (7 + 4) / (14 + 4)
    assert measured.verification_budget == (5 + 5 + 5 + 3) / 4
    # Position 1: asked of 4, accepted by 3. Position 2: asked of the 3, accepted by 2. Position 3
    # was offered by one of the two that got there.
    assert measured.conditional == (3 / 4, 2 / 3, 1.0, 1.0)
    assert measured.survival == (3 / 4, 2 / 4, 1 / 3, 1 / 3)


def test_an_end_inside_the_run_counts_no_bonus_and_judges_no_later_slot() -> None:
    cut = round_record(4, 2, cut=True)
    assert cut.judged == 2
    measured = measure_acceptance([cut, round_record(4, 2)])
    assert measured.accepted_length == (2 + 3) / 2
    assert measured.acceptance_rate == 4 / (2 + 4)
    assert measured.figure5_rate == 5 / (3 + 5)
    assert measured.verification_budget == 5.0  # what was verified was verified all the same
    assert measured.conditional == (1.0, 1.0, 0.0, None)  # slot 3 was refused once, not twice
    assert measured.survival == (1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("accepted", [1, 4])
def test_an_end_at_the_targets_own_token_is_an_ordinary_round(accepted: int) -> None:
    """The corrected or bonus token was the end of the text: the slot before it was judged."""
    ended = measure_acceptance([round_record(4, accepted, ended=True)])
    assert ended == measure_acceptance([round_record(4, accepted)])


def test_plain_decoding_is_an_accepted_length_of_one() -> None:
    measured = measure_acceptance([round_record(0, 0), round_record(0, 0)])
    assert measured.accepted_length == measured.verification_budget == measured.figure5_rate == 1.0
    assert measured.acceptance_rate is None
    assert measured.conditional == measured.survival == ()


def test_no_round_has_no_ratio() -> None:
    measured = measure_acceptance([])
    assert measured.rounds == 0
    assert measured.accepted_length is None
    assert measured.verification_budget is None


def test_survival_is_the_product_of_conditionals_where_offers_are_equal() -> None:
    counts = [4, 3, 3, 1, 0, 2, 4, 1, 1]
    measured = measure_acceptance([round_record(4, accepted) for accepted in counts])
    product = 1.0
    for conditional, survival in zip(measured.conditional, measured.survival, strict=True):
        assert conditional is not None
        product *= conditional
        assert survival == pytest.approx(product)
    assert measured.accepted_length == pytest.approx(1 + sum(filter(None, measured.survival)))
