"""Sequential temperature scaling (paper, section 3.2.1)."""

import numpy as np
import numpy.typing as npt

from dspark.calibration.arrays import BoolArray, FloatArray
from dspark.calibration.confidence import conditional_confidence
from dspark.calibration.metrics import expected_calibration_error, floor_of_ece
from dspark.calibration.samples import Rounds
from dspark.core.errors import DataError

LEAST_ROUNDS = 20
"""Below it a temperature would be noise, and is refused."""
FEW_ROUNDS = 1000
"""Below it a report says so: a perfect predictor shows an ECE of 2% and more."""

GRID: FloatArray = np.geomspace(0.1, 10.0, 161)
"""Temperatures that are tried: 2.9% apart, 1 among them."""


def fit_temperatures(rounds: Rounds, grids: npt.ArrayLike = GRID) -> FloatArray:
    """Temperatures [K], fitted from left to right.

    Position k takes the temperature of its grid under which the ECE of the cumulative product of
    confidences up to k is least, those before it fixed. Few rounds leave many temperatures that
    noise cannot tell apart, some of which flatten what the head knows: so of all whose ECE is
    within a standard deviation of a perfect predictor's from the least, the one with the best Brier
    score is taken; of equals the one nearest to 1.

    grids: temperatures to try, [G], or [K, G] for a grid of each position's own.
    Every position needs a verified round; `check_enough` says when there are enough to rely on it.
    """
    size = rounds.block_size
    grids_KG = np.broadcast_to(np.asarray(grids, dtype=np.float64), (size, np.shape(grids)[-1]))
    temperatures = np.ones(size)
    before_N = np.ones(len(rounds))
    for column in range(size):
        counted, logits = rounds.counted(column), rounds.logits_NK[:, column]
        temperatures[column] = _best(
            before_N[counted], logits[counted], rounds.labels(column)[counted], grids_KG[column]
        )
        before_N = before_N * _scaled(logits, temperatures[column])
    return temperatures


def _best(
    before_N: FloatArray, logits_N: FloatArray, labels_N: BoolArray, grid_G: FloatArray
) -> float:
    errors, scores = np.empty(len(grid_G)), np.empty(len(grid_G))
    for index, temperature in enumerate(grid_G):
        predictions = before_N * _scaled(logits_N, temperature)
        errors[index] = expected_calibration_error(predictions, labels_N)
        scores[index] = np.square(predictions - labels_N).mean()
    least = before_N * _scaled(logits_N, grid_G[errors.argmin()])
    # A fit is a function of its data: the noise is always measured with the same draws.
    noise = floor_of_ece(least, np.random.default_rng(0), draws=50).std()
    scores[errors > errors.min() + noise] = np.inf
    best = grid_G[scores == scores.min()]
    return float(best[np.abs(np.log(best)).argmin()])


def survival(rounds: Rounds, temperatures: npt.ArrayLike | None = None) -> FloatArray:
    """Predicted survival [N, K] of the rounds' prefixes."""
    confidence_NK = conditional_confidence(rounds.logits_NK, temperatures)
    return np.asarray(np.cumprod(confidence_NK, axis=1), dtype=np.float64)


def check_enough(rounds: Rounds) -> None:
    """DataError when a position has too few rounds to fit or to judge."""
    for column, count in enumerate(rounds.samples):
        if count < LEAST_ROUNDS:
            raise DataError(
                f"position {column + 1} has {count} verified rounds on one half of the prompts, a "
                f"temperature needs at least {LEAST_ROUNDS}; give more prompts, --samples or "
                "--max-new-tokens"
            )


def _scaled(logits_N: FloatArray, temperature: float) -> FloatArray:
    return conditional_confidence(logits_N[:, None], [temperature])[:, 0]
