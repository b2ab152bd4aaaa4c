"""Confidence logits to conditional confidences."""

import math

import numpy as np
import pytest

from dspark.calibration.confidence import conditional_confidence
from dspark.core.errors import ConfigError, DSparkError


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


def test_rows_may_have_temperatures_of_their_own() -> None:
    logits_RK = [[1.0, 2.0], [1.0, 2.0]]
    both = conditional_confidence(logits_RK, [[1.0, 1.0], [2.0, 4.0]])
    assert both[0].tolist() == conditional_confidence(logits_RK)[0].tolist()
    assert both[1].tolist() == conditional_confidence(logits_RK, [2.0, 4.0])[1].tolist()
