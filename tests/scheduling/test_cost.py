"""The SPS curve: lookups, and tables that are refused."""

import math
from fractions import Fraction

import pytest

from dspark.core.errors import ConfigError
from dspark.scheduling.cost import SpsCurve


def test_a_measured_size_is_looked_up_as_it_is() -> None:
    curve = SpsCurve.from_points([1, 2, 3], [9.0, 4.0, 5.0])
    assert curve([3, 1, 2]).tolist() == [5.0, 9.0, 4.0]
    assert curve.max_batch_tokens == 3


def test_sizes_between_measured_ones_cost_what_the_lookup_says() -> None:
    padded = SpsCurve.from_points([2, 4, 8], [9.0, 6.0, 3.0], lookup="ceil")
    assert padded(range(1, 9)).tolist() == [9, 9, 6, 6, 3, 3, 3, 3]
    stepped = SpsCurve.from_points([1, 4, 8], [9.0, 6.0, 3.0], lookup="floor")
    assert stepped(range(1, 9)).tolist() == [9, 9, 9, 6, 6, 6, 6, 3]


def test_beyond_the_last_measured_size_the_rate_is_zero() -> None:
    curve = SpsCurve.from_points([1, 2], [9.0, 8.0])
    assert curve([2, 3, 1000]).tolist() == [8.0, 0.0, 0.0]


def test_fractions_stay_exact() -> None:
    curve = SpsCurve.from_points([1, 2], [Fraction(1, 3), Fraction(1, 7)])
    assert curve([2]).tolist() == [Fraction(1, 7)]


@pytest.mark.parametrize(
    ("sizes", "rates", "lookup", "message"),
    [
        ([1], [1.0], "exact", "1 point"),
        ([], [], "exact", "0 point"),
        ([1, 2], [1.0], "exact", "2 batch sizes and 1 rates"),
        ([1, 3, 2], [1.0, 1.0, 1.0], "exact", "2 tokens after 3; sort"),
        ([1, 2, 2], [1.0, 1.0, 1.0], "exact", "2 tokens after 2"),
        ([1, 2, 5], [1.0, 1.0, 1.0], "exact", "gap between 2 and 5"),
        ([2, 3], [1.0, 1.0], "exact", "starts at 2 tokens; measure it from 1"),
        ([2, 3], [1.0, 1.0], "floor", "starts at 2 tokens"),
        ([0, 1], [1.0, 1.0], "exact", "from 0 to 1 tokens; they must lie in 1.."),
        ([1, 2**40], [1.0, 1.0], "ceil", "must lie in 1.."),
        ([1, 2.5], [1.0, 1.0], "ceil", "whole numbers"),
        ([1, 2], [1.0, 0.0], "exact", "0.0 steps per second at 2 tokens"),
        ([1, 2], [-1.0, 1.0], "exact", "-1.0 steps per second at 1 tokens"),
        ([1, 2], [1.0, math.nan], "exact", "nan steps per second"),
        ([1, 2], [math.inf, 1.0], "exact", "inf steps per second"),
        ([1, 2], [Fraction(1), Fraction(0)], "exact", "0 steps per second at 2 tokens"),
        ([1, 2], [1.0, 1.0], "linear", "lookup is 'linear'; it must be exact, ceil, floor"),
    ],
)
def test_bad_tables_are_refused(sizes: list, rates: list, lookup: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        SpsCurve.from_points(sizes, rates, lookup=lookup)
    assert "\n" not in str(refusal.value)
