"""Confidence logits to conditional confidences."""

import math

import numpy as np
import pytest

from dspark.calibration.confidence import Scaling, conditional_confidence
from dspark.core.errors import ConfigError, DSparkError


def test_confidence_is_the_sigmoid_of_the_scaled_logit() -> None:
    logits_RK = np.array([[0.0, 2.0], [-1.0, math.log(3.0)]], dtype=np.float32)
    plain = conditional_confidence(logits_RK)
    assert plain.dtype == np.float64
    assert plain[0, 0] == 0.5
    assert plain[1, 1] == pytest.approx(0.75, abs=1e-7)
    entropies_RK = np.array([[0.5, 2.0], [0.0, 1.0]])
    scaled = Scaling.of_temperatures([1.0, 2.0]).confidence(logits_RK, entropies_RK)
    assert scaled[:, 0].tolist() == plain[:, 0].tolist()
    assert scaled[0, 1] == pytest.approx(1 / (1 + math.exp(-1.0)))
    shifted = Scaling([1.0, 2.0], [0.0, -1.0], [0.0, 0.0]).confidence(logits_RK, entropies_RK)
    assert shifted[:, 0].tolist() == plain[:, 0].tolist()
    assert shifted[0, 1] == pytest.approx(0.5), "divided first, then shifted"
    weighed = Scaling([1.0, 2.0], [0.0, -1.0], [0.0, -0.5]).confidence(logits_RK, entropies_RK)
    assert weighed[:, 0].tolist() == plain[:, 0].tolist()
    assert weighed[0, 1] == pytest.approx(1 / (1 + math.exp(1.0))), "entropy is not divided"


def test_extreme_logits_neither_overflow_nor_leave_the_unit_interval() -> None:
    confidence = conditional_confidence([[-1e30, -800.0, 800.0, math.inf, -math.inf]])
    assert ((confidence >= 0) & (confidence <= 1)).all()
    assert confidence[0, 2:4].tolist() == [1.0, 1.0]
    assert confidence[0, 0] < 1e-300


def test_nan_logits_are_refused() -> None:
    with pytest.raises(DSparkError, match="NaN"):
        conditional_confidence([[0.0, math.nan]])
    with pytest.raises(DSparkError, match="NaN"):
        Scaling.identity(2).confidence([[0.0, 0.0]], [[0.0, math.nan]])


@pytest.mark.parametrize(
    ("temperatures", "message"),
    [
        ([1.0], "for blocks of 1; the drafter's block is 2"),
        ([1.0, 0.0], "must be positive"),
        ([1.0, math.nan], "must be positive"),
        ([1.0, math.inf], "must be positive and finite"),
    ],
)
def test_temperatures_that_do_not_fit_are_refused(temperatures: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scaling.of_temperatures(temperatures).confidence([[0.0, 0.0]], [[1.0, 1.0]])


@pytest.mark.parametrize("values", [[0.0, math.nan], [math.inf, 0.0]])
def test_offsets_and_weights_must_be_finite(values: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"offsets are .* finite"):
        Scaling([1.0, 1.0], values, [0.0, 0.0])
    with pytest.raises(ConfigError, match=r"entropy weights are .* finite"):
        Scaling([1.0, 1.0], [0.0, 0.0], values)


def test_as_many_offsets_and_weights_as_temperatures() -> None:
    with pytest.raises(ConfigError, match="2 temperatures, 1 offsets and 2 entropy weights"):
        Scaling([1.0, 1.0], [0.0], [0.0, 0.0])
    with pytest.raises(ConfigError, match="2 temperatures, 2 offsets and 1 entropy weights"):
        Scaling([1.0, 1.0], [0.0, 0.0], [0.0])


def test_rows_may_have_a_scaling_of_their_own() -> None:
    logits_RK = [[1.0, 2.0], [1.0, 2.0]]
    entropies_RK = [[0.1, 0.2], [0.3, 0.4]]
    other = Scaling([2.0, 4.0], [0.5, -0.5], [-1.0, -2.0])
    both = Scaling.rows([Scaling.identity(2), other]).confidence(logits_RK, entropies_RK)
    assert both[0].tolist() == conditional_confidence(logits_RK)[0].tolist()
    assert both[1].tolist() == other.confidence(logits_RK, entropies_RK)[1].tolist()


def test_positions_are_cut_and_put_together_again() -> None:
    one, other = Scaling([2.0, 4.0], [0.5, -0.5], [-1.0, -2.0]), Scaling([3.0], [0.25], [0.75])
    joined = one.with_first(other)
    assert joined.temperatures.tolist() == [3.0, 4.0]
    assert joined.offsets.tolist() == [0.25, -0.5]
    assert joined.entropy_weights.tolist() == [0.75, -2.0]
    assert joined.first(1).entropy_weights.tolist() == [0.75]
