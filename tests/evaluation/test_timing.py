"""Shares of a round, on records with times by hand."""

import pytest

from dspark.evaluation.timing import phase_shares, time_per_token
from tests.evaluation.records import round_record, step_record


def test_shares_are_of_the_time_of_all_steps() -> None:
    shares = phase_shares(
        [
            step_record(round_record(4, 2), draft=1.0, draft_head=0.5, verify=2.5),
            step_record(round_record(4, 2), draft=2.0, draft_head=0.5, verify=3.5),
        ]
    )
    assert shares == {"draft": 0.3, "draft_head": 0.1, "verify": 0.6}
    assert sum(shares.values()) == pytest.approx(1.0)


def test_prefill_is_no_part_of_a_round() -> None:
    decode = step_record(round_record(4, 2), draft=1.0, verify=3.0)
    mixed = step_record(round_record(4, 2), prefill=100, draft=1.0, verify=90.0)
    alone = step_record(prefill=100, verify=90.0)
    assert phase_shares([alone, mixed, decode]) == {"draft": 0.25, "verify": 0.75}
    assert phase_shares([alone]) == {}


def test_time_per_token() -> None:
    assert time_per_token(2.0, 8.0, tokens=4) == 2.0
    assert time_per_token(2.0, 2.0, tokens=1) is None
