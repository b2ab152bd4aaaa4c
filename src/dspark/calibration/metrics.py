"""How good the predictions of one position are: ECE, ROC-AUC, Brier score, bias.

A prediction is the survival of a prefix, its label whether that prefix was accepted. Every metric
takes weights per prompt, which is what resampling prompts comes to: `[S, P]` weights give S values.
"""

import numpy as np

from dspark.calibration.arrays import BoolArray, FloatArray, IntArray
from dspark.core.bins import BINS


def bin_of(predictions_N: FloatArray) -> IntArray:
    """Bin [N] of predictions in [0, 1]; 1 belongs to the last one."""
    return np.minimum((predictions_N * BINS).astype(np.int64), BINS - 1)


def expected_calibration_error(predictions_N: FloatArray, labels_N: BoolArray) -> float:
    """Mean over rounds of their bin's |mean prediction - mean label| (Naeini et al., 2015)."""
    assert len(predictions_N), "a metric of no rounds"
    gaps = np.bincount(bin_of(predictions_N), weights=predictions_N - labels_N, minlength=BINS)
    return float(np.abs(gaps).sum() / len(predictions_N))


def floor_of_ece(
    predictions_N: FloatArray, generator: np.random.Generator, draws: int = 200
) -> FloatArray:
    """ECEs [draws] that these very predictions would show, were each label drawn with its own
    prediction: what a perfect predictor cannot get below at this sample size."""
    bins = bin_of(predictions_N)
    errors = np.empty(draws)
    for draw in range(draws):
        labels = generator.random(len(predictions_N)) < predictions_N
        gaps = np.bincount(bins, weights=predictions_N - labels, minlength=BINS)
        errors[draw] = np.abs(gaps).sum() / len(predictions_N)
    return errors


class Metrics:
    """The metrics of one position, for any weights of its prompts."""

    def __init__(self, predictions_N: FloatArray, labels_N: BoolArray, prompts_N: IntArray) -> None:
        assert len(predictions_N), "a metric of no rounds"
        _, self._prompts = np.unique(prompts_N, return_inverse=True)
        self.prompts = int(self._prompts.max()) + 1
        gaps = predictions_N - labels_N
        cells = self._prompts * BINS + bin_of(predictions_N)
        size = self.prompts * BINS
        self._gaps = np.bincount(cells, weights=gaps, minlength=size).reshape(-1, BINS)
        self._squares = np.bincount(self._prompts, weights=gaps**2)
        self._counts = np.bincount(self._prompts)
        order = np.argsort(predictions_N, kind="stable")
        ordered = predictions_N[order]
        self._owner, self._label = self._prompts[order], labels_N[order]
        self._ties = np.flatnonzero(np.r_[True, ordered[1:] > ordered[:-1]])

    @property
    def once(self) -> FloatArray:
        """Weights [1, P] of the sample as it is."""
        return np.ones((1, self.prompts))

    def resampled(self, generator: np.random.Generator, resamples: int) -> FloatArray:
        """Weights [S, P]: how often each prompt is drawn, with replacement."""
        share = np.full(self.prompts, 1 / self.prompts)
        return generator.multinomial(self.prompts, share, size=resamples).astype(np.float64)

    def ece(self, weights_SP: FloatArray) -> FloatArray:
        """Expected calibration error [S]."""
        result: FloatArray = np.abs(weights_SP @ self._gaps).sum(1) / (weights_SP @ self._counts)
        return result

    def bias(self, weights_SP: FloatArray) -> FloatArray:
        """Mean prediction minus mean label [S]: positive is over-confident."""
        result: FloatArray = (weights_SP @ self._gaps).sum(1) / (weights_SP @ self._counts)
        return result

    def brier(self, weights_SP: FloatArray) -> FloatArray:
        """Mean squared difference of prediction and label [S]."""
        result: FloatArray = (weights_SP @ self._squares) / (weights_SP @ self._counts)
        return result

    def auc(self, weights_SP: FloatArray) -> FloatArray:
        """Probability [S] that an accepted prefix was predicted above a rejected one, ties half;
        NaN where the sample has only one of the two."""
        result = np.full(len(weights_SP), np.nan)
        for row, weights in enumerate(weights_SP):
            weight = weights[self._owner]
            accepted = np.add.reduceat(weight * self._label, self._ties)
            rejected = np.add.reduceat(weight * ~self._label, self._ties)
            pairs = accepted.sum() * rejected.sum()
            if pairs:
                below = np.cumsum(rejected) - rejected / 2
                result[row] = (accepted * below).sum() / pairs
        return result


def interval(values_S: FloatArray, level: float = 0.95) -> tuple[float, float] | None:
    """Percentile interval; None if a value is undefined."""
    if np.isnan(values_S).any():
        return None
    tail = (1 - level) / 2
    low, high = np.quantile(values_S, [tail, 1 - tail])
    return float(low), float(high)
