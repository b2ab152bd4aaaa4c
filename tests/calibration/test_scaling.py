"""Sequential temperature scaling finds what was put in, position by position, from the left."""

import numpy as np
import pytest

from dspark.calibration.metrics import expected_calibration_error
from dspark.calibration.report import report
from dspark.calibration.scaling import GRID, check_enough, fit_temperatures, survival
from dspark.core.errors import DataError
from tests.calibration.synthetic import BLOCK, synthetic

OVER_CONFIDENT = (3.0, 0.5, 2.0)


def error(rounds, temperatures, column):
    counted = rounds.counted(column)
    return expected_calibration_error(
        survival(rounds, temperatures)[counted, column], rounds.labels(column)[counted]
    )


def test_a_known_miscalibration_is_undone():
    fitted = fit_temperatures(synthetic(20_000, OVER_CONFIDENT))
    assert fitted == pytest.approx(OVER_CONFIDENT, rel=0.15)


def test_held_out_rounds_are_predicted_to_the_floor():
    fitted = fit_temperatures(synthetic(20_000, OVER_CONFIDENT))
    held_out = synthetic(20_000, OVER_CONFIDENT, seed=1)
    for position in report(held_out, fitted, seed=0, resamples=50):
        assert position.ece_before > 0.03
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
        scores = [np.square(survival(rounds, [t])[:, 0] - labels).mean() for t in grid]
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
    first = fit_temperatures(part)[0]
    fitted = fit_temperatures(only, np.array([[first], [0.5], [2.0]]))
    assert fitted[0] == first
    assert fit_temperatures(part, np.array([[first, first], [0.5, 4.0], [2.0, 9.0]]))[1] == 0.5


def test_of_equal_temperatures_the_one_nearest_to_one_is_taken():
    rounds = synthetic(60)
    always = rounds.__class__(
        np.full_like(rounds.logits_NK, np.inf), np.full(60, 3), rounds.judged_N, rounds.prompts_N
    )
    assert fit_temperatures(always).tolist() == [1.0] * BLOCK


def test_one_is_on_the_grid():
    assert 1.0 in GRID


def test_too_few_rounds_are_refused_with_the_position_and_the_limit():
    judged = np.where(np.arange(100) < 10, BLOCK, 2)
    with pytest.raises(DataError, match=r"position 3 has 10 .* at least 20"):
        check_enough(synthetic(100, judged=judged))
    with pytest.raises(DataError, match="position 1 has 5"):
        report(synthetic(5), [1.0] * BLOCK, seed=0)


def test_a_small_sample_says_how_little_it_says():
    positions = report(synthetic(200, seed=2), [1.0] * BLOCK, seed=0, resamples=50)
    for position in positions:
        assert position.samples == 200
        assert position.ece_floor > 0.02
        assert position.ece_floor < position.ece_floor_p95


def test_a_position_without_any_acceptance_has_no_auc_and_no_interval_of_it():
    rounds = synthetic(100)
    rejected = rounds.__class__(
        rounds.logits_NK, np.zeros(100, dtype=int), rounds.judged_N, rounds.prompts_N
    )
    (first, *_) = report(rejected, [1.0] * BLOCK, seed=0, resamples=20)
    assert first.auc is None
    assert first.auc_ci95 is None
    assert first.accepted == 0


def test_one_prompt_has_no_interval():
    (first, *_) = report(synthetic(100, prompts=1), [1.0] * BLOCK, seed=0)
    assert first.ece_after_ci95 is None
