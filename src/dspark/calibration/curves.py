"""The lines of a reliability diagram (paper, figure 6)."""

from dataclasses import dataclass

import numpy as np

from dspark.calibration.arrays import BoolArray, FloatArray
from dspark.calibration.metrics import bin_of
from dspark.core.bins import BINS


@dataclass(frozen=True, slots=True)
class ReliabilityCurve:
    """Of the bins that hold a round: on the diagonal is calibrated, below it over-confident."""

    predicted: tuple[float, ...]
    """Mean prediction of a bin."""
    accepted: tuple[float, ...]
    """Share of its prefixes that were accepted."""
    counts: tuple[int, ...]
    """Its rounds."""


def reliability_curve(predictions_N: FloatArray, labels_N: BoolArray) -> ReliabilityCurve:
    bins = bin_of(predictions_N)
    counts = np.bincount(bins, minlength=BINS)
    held = counts > 0
    predicted = np.bincount(bins, weights=predictions_N, minlength=BINS)[held] / counts[held]
    accepted = np.bincount(bins, weights=labels_N, minlength=BINS)[held] / counts[held]
    return ReliabilityCurve(
        tuple(predicted.tolist()), tuple(accepted.tolist()), tuple(counts[held].tolist())
    )
