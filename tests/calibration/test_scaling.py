"""Both fits find what was put in, position by position."""

from dataclasses import replace

import numpy as np
import pytest

from dspark.calibration.confidence import Scaling
from dspark.calibration.metrics import expected_calibration_error
from dspark.calibration.report import report
from dspark.calibration.scaling import (
    GRID,
    MOST_ENTROPY_WEIGHT,
    MOST_OFFSET,
    check_enough,
    fit_scaling,
    fit_temperatures,
    survival,
)
from dspark.core.errors import DataError
from tests.calibration.synthetic import BLOCK, synthetic

OVER_CONFIDENT = (3.0, 0.5, 2.0)
HEAD = Scaling.identity(BLOCK)


def error(rounds, temperatures, column):
    counted = rounds.counted(column)
    return expected_calibration_error(
        survival(rounds, Scaling.of_temperatures(temperatures))[counted, column],
        rounds.labels(column)[counted],
    )


def test_a_known_miscalibration_is_undone():
    fitted = fit_temperatures(synthetic(20_000, OVER_CONFIDENT))
    assert fitted == pytest.approx(OVER_CONFIDENT, rel=0.15)


def test_held_out_rounds_are_predicted_to_the_floor():
    fitted = fit_temperatures(synthetic(20_000, OVER_CONFIDENT))
    held_out = synthetic(20_000, OVER_CONFIDENT, seed=1)
    scaling = Scaling.of_temperatures(fitted)
    for position in report(held_out, scaling, fitted, HEAD, seed=0, resamples=50):
        assert position.ece_before > 0.03
        assert position.ece_after == position.ece_temperature_alone
        assert position.ece_after < 3 * position.ece_floor
        low, high = position.ece_after_ci95
        assert low < high < position.ece_before


def test_each_position_is_fitted_with_those_before_it_fixed():
    """By brute force over coarse grids, whose temperatures differ by more than noise."""
    rounds = synthetic(20_000, OVER_CONFIDENT)
    grid = np.array([0.5, 2.0, 9.0])
    fitted = fit_temperatures(rounds, grid)
    for column in range(BLOCK):
        errors = [
            error(rounds, [*fitted[:column], temperature, *[1.0] * (BLOCK - column - 1)], column)
            for temperature in grid
        ]
        assert fitted[column] == grid[np.argmin(errors)]


def test_of_temperatures_that_noise_cannot_tell_apart_the_best_brier_score_is_taken():
    grid = np.array([0.3, 0.6, 1.0, 1.6, 3.0, 9.0])
    better = 0
    for seed in range(10):
        rounds = synthetic(150, (1.0,), seed=seed)
        labels = rounds.labels(0)
        scores = [
            np.square(survival(rounds, Scaling.of_temperatures([t]))[:, 0] - labels).mean()
            for t in grid
        ]
        least = scores[np.argmin([error(rounds, [t], 0) for t in grid])]
        (fitted,) = fit_temperatures(rounds, grid)
        found = scores[[*grid].index(fitted)]
        assert found <= least
        better += found < least
    assert better > 0


def test_positions_that_were_not_judged_do_not_count():
    judged = np.where(np.arange(6000) % 3 == 0, BLOCK, 1)
    part = synthetic(6000, OVER_CONFIDENT, judged=judged)
    only = part.select(part.judged_N == BLOCK)
    assert fit_scaling(part).offsets[1:].tolist() == fit_scaling(only).offsets[1:].tolist()
    assert fit_scaling(part).offsets[0] != fit_scaling(only).offsets[0]
    grid = np.array([0.5, 3.0])
    assert fit_temperatures(part, grid).tolist() == fit_temperatures(only, grid).tolist()


def test_a_head_too_sure_of_everything_is_corrected_by_an_offset_and_not_by_a_temperature():
    """What drafting rounds do to a head that was trained at random positions."""
    fitted, held_out = synthetic(20_000, shift=-1.0), synthetic(20_000, shift=-1.0, seed=1)
    scaling, alone = fit_scaling(fitted), fit_temperatures(fitted)
    assert scaling.offsets == pytest.approx([-1.0] * BLOCK, abs=0.1)
    assert scaling.temperatures == pytest.approx([1.0] * BLOCK, rel=0.1)
    positions = report(held_out, scaling, alone, HEAD, seed=0, resamples=20)
    for position in positions:
        assert position.ece_after < 3 * position.ece_floor
    first = positions[0]
    assert first.ece_temperature_alone > 5 * first.ece_after


def test_entropy_gets_the_weight_that_it_has_and_tells_rounds_apart_that_the_head_cannot():
    fitted, held_out = (synthetic(20_000, weight=-1.2, seed=seed) for seed in (0, 1))
    scaling, without = fit_scaling(fitted), fit_scaling(fitted.without_entropy())
    assert scaling.entropy_weights == pytest.approx([-1.2] * BLOCK, abs=0.15)
    assert scaling.offsets == pytest.approx([0.0] * BLOCK, abs=0.2)
    assert without.entropy_weights.tolist() == [0.0] * BLOCK
    positions = report(held_out, scaling, fit_temperatures(fitted), without, seed=0, resamples=20)
    for position in positions:
        assert position.ece_after < 3 * position.ece_floor
        assert position.auc > position.auc_without_entropy + 0.05
        assert position.brier < position.brier_without_entropy < position.brier_before
    first = positions[0]
    # One position's temperature and offset change no order.
    assert first.auc_before == first.auc_temperature_alone == first.auc_without_entropy


def test_a_weight_that_is_given_is_kept_and_the_others_are_the_likeliest_beside_it():
    rounds = synthetic(20_000, (2.0,), weight=-1.2)
    kept = [Scaling([t], [o], [-1.2]) for t, o in ((0.1, -5.0), (10.0, 5.0))]
    fitted = fit_scaling(rounds, *kept)
    assert fitted.entropy_weights.tolist() == [-1.2]
    assert fitted.temperatures == pytest.approx([2.0], rel=0.1)
    assert fitted.offsets == pytest.approx([0.0], abs=0.1)
    opposite = [Scaling([t], [o], [1.2]) for t, o in ((0.1, -5.0), (10.0, 5.0))]
    other = fit_scaling(rounds, *opposite)
    assert other.entropy_weights.tolist() == [1.2]
    assert other.offsets[0] < -2.0
    (bias,) = survival(rounds, other).mean(0) - rounds.labels(0).mean()
    assert bias == pytest.approx(0.0, abs=1e-2)


def test_a_weight_ends_at_its_bound():
    rounds = synthetic(3000, (1.0,), weight=-9.0, shift=9.0)
    assert fit_scaling(rounds).entropy_weights.tolist() == [-MOST_ENTROPY_WEIGHT]


def test_a_scaling_is_the_likeliest_of_its_neighbours():
    rounds = synthetic(500, (2.0, 0.7, 1.0), shift=-0.5, weight=-0.6)

    def loss(scaling):
        confidence = survival(rounds, scaling)
        total = 0.0
        for column in range(BLOCK):
            reached = rounds.accepted_N >= column
            before = confidence[reached, column - 1] if column else 1.0
            chance, label = confidence[reached, column] / before, rounds.labels(column)[reached]
            total -= np.log(np.where(label, chance, 1 - chance)).sum()
        # The prior: two squared logits of (slope, offset, weight) about the head as it is.
        slopes = 1 / scaling.temperatures - 1
        squares = np.square([slopes, scaling.offsets, scaling.entropy_weights])
        return total + 2 * squares.sum()

    fitted = fit_scaling(rounds)
    least = loss(fitted)
    names = ("temperatures", "offsets", "entropy_weights")
    for name in names:
        for column in range(BLOCK):
            for change in (-0.02, 0.02):
                values = {n: getattr(fitted, n).copy() for n in names}
                values[name][column] += change
                assert loss(Scaling(**values)) > least


def test_few_rounds_leave_the_head_nearly_as_it_is():
    rounds = synthetic(20, shift=-3.0)
    fitted = fit_scaling(rounds.select(np.arange(20) < 2))
    assert (np.abs(fitted.offsets) < 0.5).all()
    assert (np.abs(fitted.temperatures - 1) < 0.7).all()
    assert (np.abs(fitted.entropy_weights) < 0.7).all()


def test_bounds_hold_and_the_offset_is_that_of_the_bounded_temperature():
    rounds = synthetic(20_000, (4.0,), shift=-1.0)
    least, most = Scaling([0.5], [-0.3], [0.0]), Scaling([2.0], [0.3], [0.0])
    fitted = fit_scaling(rounds, least, most)
    assert fitted.temperatures == pytest.approx([2.0])
    assert fitted.offsets.tolist() == [-0.3]
    bounded = fit_scaling(rounds, Scaling([2.0], [-5.0], [0.0]), Scaling([2.0], [5.0], [0.0]))
    assert bounded.temperatures == pytest.approx([2.0])
    (bias,) = survival(rounds, bounded).mean(0) - rounds.labels(0).mean()
    assert bias == pytest.approx(0.0, abs=1e-3)


def test_a_head_that_is_wrong_way_round_ends_at_the_flattest_temperature():
    rounds = synthetic(5000)
    turned = replace(rounds, logits_NK=-rounds.logits_NK)
    fitted = fit_scaling(turned)
    assert fitted.temperatures == pytest.approx([GRID[-1]] * BLOCK)
    assert (np.abs(fitted.offsets) < MOST_OFFSET).all()


def test_of_equal_temperatures_the_one_nearest_to_one_is_taken():
    rounds = synthetic(60)
    sure = np.full_like(rounds.logits_NK, np.inf)
    always = replace(rounds, logits_NK=sure, accepted_N=np.full(60, 3))
    assert fit_temperatures(always).tolist() == [1.0] * BLOCK


def test_one_is_on_the_grid():
    assert 1.0 in GRID


def test_too_few_rounds_are_refused_with_the_position_and_the_limit():
    judged = np.where(np.arange(100) < 10, BLOCK, 2)
    with pytest.raises(DataError, match=r"position 3 has 10 .* at least 20"):
        check_enough(synthetic(100, judged=judged))
    with pytest.raises(DataError, match="position 1 has 5"):
        report(synthetic(5), HEAD, [1.0] * BLOCK, HEAD, seed=0)


def test_a_small_sample_says_how_little_it_says():
    positions = report(synthetic(200, seed=2), HEAD, [1.0] * BLOCK, HEAD, seed=0, resamples=50)
    for position in positions:
        assert position.samples == 200
        assert position.ece_floor > 0.02
        assert position.ece_floor < position.ece_floor_p95


def test_a_position_without_any_acceptance_has_no_auc_and_no_interval_of_it():
    rounds = synthetic(100)
    rejected = replace(rounds, accepted_N=np.zeros(100, dtype=int))
    (first, *_) = report(rejected, HEAD, [1.0] * BLOCK, HEAD, seed=0, resamples=20)
    assert first.auc is None
    assert first.auc_ci95 is None
    assert first.accepted == 0


def test_one_prompt_has_no_interval():
    (first, *_) = report(synthetic(100, prompts=1), HEAD, [1.0] * BLOCK, HEAD, seed=0)
    assert first.ece_after_ci95 is None
