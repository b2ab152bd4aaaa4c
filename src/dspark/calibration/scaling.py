"""Two ways to calibrate confidences: the paper's temperatures, and a regression with more evidence.

A confidence head is trained at random positions of texts, drafting rounds begin behind rejections,
where less is accepted: it is too sure of every position. A temperature turns
logits about zero and cannot take that away; a temperature with an offset can (Platt scaling). And
the entropy of what a slot is drawn from knows of its chances what the head does not: it gets a
weight of its own. The paper's temperatures stay for engines that know no other
(`calibration.export`), and to be compared with.
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
MOST_ENTROPY_WEIGHT = 5.0
"""In logits a nat, either way."""
_PRIOR = 4.0
"""Pull towards the head as it is, in squared logits: worth about twenty rounds."""
_HEAD: FloatArray = np.array([1.0, 0.0, 0.0])
"""The head as it is: slope of the logit (1 / temperature), weight of the entropy, offset."""
_LARGEST_LOGIT = 30.0


def fit_scaling(
    rounds: Rounds, least: Scaling | None = None, most: Scaling | None = None
) -> Scaling:
    """Temperature, offset and entropy weight [K] of each position: the likeliest, of the rounds
    that reached it.

    A round reaches position k when the prefix before it was accepted; there the conditional
    confidence has a label of its own. Which rounds verify a position may depend on their logits and
    entropies (a policy's choice): given those, that says nothing of the label.

    least, most: bounds, of `rounds.block_size`; what is equal in both is kept.
    """
    size = rounds.block_size
    least, most = least or _bound(GRID[0], -1, size), most or _bound(GRID[-1], 1, size)
    lows_3K = np.stack([1 / most.temperatures, least.entropy_weights, least.offsets])
    highs_3K = np.stack([1 / least.temperatures, most.entropy_weights, most.offsets])
    assert (lows_3K <= highs_3K).all()
    fitted_3K = np.empty((3, size))
    for column in range(size):
        reached = rounds.counted(column) & (rounds.accepted_N >= column)
        logits = np.clip(rounds.logits_NK[reached, column], -_LARGEST_LOGIT, _LARGEST_LOGIT)
        inputs_N3 = np.stack(
            [logits, rounds.entropies_NK[reached, column], np.ones_like(logits)], axis=1
        )
        labels = rounds.labels(column)[reached]
        fitted_3K[:, column] = _bounded(inputs_N3, labels, lows_3K[:, column], highs_3K[:, column])
    return Scaling(1 / fitted_3K[0], fitted_3K[2], fitted_3K[1])


def _bound(temperature: float, sign: int, size: int) -> Scaling:
    each = np.ones(size)
    return Scaling(temperature * each, sign * MOST_OFFSET * each, sign * MOST_ENTROPY_WEIGHT * each)


def _bounded(
    inputs_N3: FloatArray, labels_N: BoolArray, lows_3: FloatArray, highs_3: FloatArray
) -> FloatArray:
    """The likeliest values [3], each brought within its bounds before the next is settled."""
    values = _HEAD.copy()
    held = lows_3 == highs_3
    values[held] = lows_3[held]
    for place in np.flatnonzero(~held):
        found = _likeliest(inputs_N3, labels_N, values, ~held)[place]
        values[place] = np.clip(found, lows_3[place], highs_3[place])
        held[place] = True
    return values


def _likeliest(
    inputs_N3: FloatArray, labels_N: BoolArray, given_3: FloatArray, free_3: BoolArray
) -> FloatArray:
    """Values [3] under which the labels are likeliest, the prior included; those that are not free
    stay as given. Newton's method on a strictly convex function, its steps halved until they
    descend."""
    prior = np.where(free_3, _HEAD, given_3)

    def loss(values: FloatArray) -> float:
        scores = inputs_N3 @ values
        likelihood = np.logaddexp(0.0, scores) - scores * labels_N
        return float(likelihood.sum() + _PRIOR / 2 * np.square(values - prior).sum())

    values, least = prior, loss(prior)
    for _ in range(100):
        chances_N = 1 / (1 + np.exp(-np.clip(inputs_N3 @ values, -700, 700)))
        slopes = inputs_N3.T @ (chances_N - labels_N) + _PRIOR * (values - prior)
        curvature = (inputs_N3.T * (chances_N * (1 - chances_N))) @ inputs_N3 + _PRIOR * np.eye(3)
        step = np.zeros(3)
        step[free_3] = np.linalg.solve(curvature[np.ix_(free_3, free_3)], slopes[free_3])
        while (found := loss(values - step)) > least and np.abs(step).max() > 1e-12:
            step = step / 2
        if not found < least:
            break
        values, least = values - step, found
    return values


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
    if scaling is None:
        confidence_NK = conditional_confidence(rounds.logits_NK)
    else:
        confidence_NK = scaling.confidence(rounds.logits_NK, rounds.entropies_NK)
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
    return conditional_confidence(logits_N[:, None] / temperature)[:, 0]
