"""Confidence logits to survival."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.errors import ConfigError, DSparkError
from dspark.scheduling.survival import conditional_confidence, survival_probabilities


def test_confidence_is_the_sigmoid_of_the_scaled_logit() -> None:
    logits_RK = np.array([[0.0, 2.0], [-1.0, math.log(3.0)]], dtype=np.float32)
    plain = conditional_confidence(logits_RK)
    assert plain.dtype == np.float64
    assert plain[0, 0] == 0.5
    assert plain[1, 1] == pytest.approx(0.75, abs=1e-7)
    scaled = conditional_confidence(logits_RK, [1.0, 2.0])
    assert scaled[:, 0].tolist() == plain[:, 0].tolist()
    assert scaled[0, 1] == pytest.approx(1 / (1 + math.exp(-1.0)))


def test_extreme_logits_neither_overflow_nor_leave_the_unit_interval() -> None:
    confidence = conditional_confidence([[-1e30, -800.0, 800.0, math.inf, -math.inf]])
    assert ((confidence >= 0) & (confidence <= 1)).all()
    assert confidence[0, 2:4].tolist() == [1.0, 1.0]
    assert confidence[0, 0] < 1e-300


@given(
    logits=st.lists(st.floats(-60, 60), min_size=1, max_size=7),
    temperature=st.floats(0.05, 20.0),
)
def test_survival_never_rises_along_a_block(logits: list[float], temperature: float) -> None:
    confidence = conditional_confidence([logits], [temperature] * len(logits))
    survival = survival_probabilities(confidence)
    assert (np.diff(survival, axis=1) <= 0).all()
    assert survival[0, -1] == pytest.approx(math.prod(confidence[0]), rel=1e-12)


def test_nan_logits_are_refused() -> None:
    with pytest.raises(DSparkError, match="NaN"):
        conditional_confidence([[0.0, math.nan]])


@pytest.mark.parametrize(
    ("temperatures", "message"),
    [
        ([1.0], "1 temperatures; the drafter's block is 2"),
        ([1.0, 0.0], "must be positive"),
        ([1.0, math.nan], "must be positive"),
        ([1.0, math.inf], "must be positive and finite"),
    ],
)
def test_temperatures_that_do_not_fit_are_refused(temperatures: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        conditional_confidence([[0.0, 0.0]], temperatures)
