"""Two ways to calibrate confidences: the paper's temperatures, and temperatures with offsets.

A confidence head is trained at random positions of texts, drafting rounds begin behind rejections,
where less is accepted: it is too sure of every position. A temperature turns
logits about zero and cannot take that away; a temperature with an offset can (Platt scaling). The
paper's own stays for engines that know no other (`calibration.export`), and to be compared with.
"""

import numpy as np
import numpy.typing as npt

from dspark.calibration.arrays import BoolArray, FloatArray
from dspark.calibration.confidence import Scaling, conditional_confidence
from dspark.calibration.metrics import expected_calibration_error, floor_of_ece
from dspark.calibration.samples import Rounds
from dspark.core.errors import DataError

LEAST_ROUNDS = 20
"""Below it a fit would be noise, and is refused."""
FEW_ROUNDS = 1000
"""Below it a report says so: a perfect predictor shows an ECE of 2% and more."""

GRID: FloatArray = np.geomspace(0.1, 10.0, 161)
"""Temperatures that are tried: 2.9% apart, 1 among them. Its ends bound those of a scaling, too."""
MOST_OFFSET = 5.0
"""In logits; beyond it a position is never or always accepted."""
_PRIOR = 4.0
"""Pull towards the head as it is, in squared logits: worth about twenty rounds."""
_LARGEST_LOGIT = 30.0


def fit_scaling(
    rounds: Rounds, least: Scaling | None = None, most: Scaling | None = None
) -> Scaling:
    """Temperature and offset [K] of each position: the likeliest, of the rounds that reached it.

    A round reaches position k when the prefix before it was accepted; there the head's conditional
    confidence has a label of its own. Which rounds verify a position may depend on their logits
    (a policy's choice): given the logits, that says nothing of the label.

    least, most: bounds, of `rounds.block_size`.
    """
    size = rounds.block_size
    least = least or Scaling(np.full(size, GRID[0]), np.full(size, -MOST_OFFSET))
    most = most or Scaling(np.full(size, GRID[-1]), np.full(size, MOST_OFFSET))
    assert (least.temperatures <= most.temperatures).all()
    assert (least.offsets <= most.offsets).all()
    temperatures, offsets = np.ones(size), np.zeros(size)
    for column in range(size):
        reached = rounds.counted(column) & (rounds.accepted_N >= column)
        logits, labels = rounds.logits_NK[reached, column], rounds.labels(column)[reached]
        logits = np.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT)
        slope, _ = _likeliest(logits, labels)
        slope = np.clip(slope, 1 / most.temperatures[column], 1 / least.temperatures[column])
        _, offset = _likeliest(logits, labels, slope)
        temperatures[column] = 1 / slope
        offsets[column] = np.clip(offset, least.offsets[column], most.offsets[column])
    return Scaling(temperatures, offsets)


def _likeliest(
    logits_N: FloatArray, labels_N: BoolArray, slope: float | None = None
) -> tuple[float, float]:
    """(slope, offset) under which the labels are likeliest, the prior included; with a slope given,
    of the offset alone. Newton's method on a strictly convex function, its steps halved until they
    descend."""
    inputs_N2 = np.stack([logits_N, np.ones_like(logits_N)], axis=1)
    free = np.array([slope is None, True])
    prior = np.array([1.0 if slope is None else slope, 0.0])

    def loss(values: FloatArray) -> float:
        scores = inputs_N2 @ values
        likelihood = np.logaddexp(0.0, scores) - scores * labels_N
        return float(likelihood.sum() + _PRIOR / 2 * np.square(values - prior).sum())

    values, least = prior, loss(prior)
    for _ in range(100):
        chances_N = 1 / (1 + np.exp(-np.clip(inputs_N2 @ values, -700, 700)))
        slopes = inputs_N2.T @ (chances_N - labels_N) + _PRIOR * (values - prior)
        curvature = (inputs_N2.T * (chances_N * (1 - chances_N))) @ inputs_N2 + _PRIOR * np.eye(2)
        step = np.zeros(2)
        step[free] = np.linalg.solve(curvature[np.ix_(free, free)], slopes[free])
        while (found := loss(values - step)) > least and np.abs(step).max() > 1e-12:
            step = step / 2
        if not found < least:
            break
        values, least = values - step, found
    return float(values[0]), float(values[1])


def fit_temperatures(rounds: Rounds, grid: npt.ArrayLike = GRID) -> FloatArray:
    """The paper's calibration (section 3.2.1): temperatures [K], fitted from left to right.

    Position k takes the temperature of its grid under which the ECE of the cumulative product of
    confidences up to k is least, those before it fixed. Few rounds leave many temperatures that
    noise cannot tell apart, some of which flatten what the head knows: so of all whose ECE is
    within a standard deviation of a perfect predictor's from the least, the one with the best Brier
    score is taken; of equals the one nearest to 1.

    grid: temperatures to try, [G].
    Every position needs a verified round; `check_enough` says when there are enough to rely on it.
    """
    size = rounds.block_size
    tried_G = np.asarray(grid, dtype=np.float64)
    temperatures = np.ones(size)
    before_N = np.ones(len(rounds))
    for column in range(size):
        counted, logits = rounds.counted(column), rounds.logits_NK[:, column]
        temperatures[column] = _best(
            before_N[counted], logits[counted], rounds.labels(column)[counted], tried_G
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


def survival(rounds: Rounds, scaling: Scaling | None = None) -> FloatArray:
    """Predicted survival [N, K] of the rounds' prefixes."""
    confidence_NK = conditional_confidence(rounds.logits_NK, scaling)
    return np.asarray(np.cumprod(confidence_NK, axis=1), dtype=np.float64)


def check_enough(rounds: Rounds) -> None:
    """DataError when a position has too few rounds to fit or to judge."""
    for column, count in enumerate(rounds.samples):
        if count < LEAST_ROUNDS:
            raise DataError(
                f"position {column + 1} has {count} verified rounds on one half of the prompts, a "
                f"fit needs at least {LEAST_ROUNDS}; give more prompts, --samples or "
                "--max-new-tokens"
            )


def _scaled(logits_N: FloatArray, temperature: float) -> FloatArray:
    return conditional_confidence(logits_N[:, None], Scaling.of_temperatures([temperature]))[:, 0]
