"""Survival: the probability that a whole prefix is accepted (paper, section 3.2.2)."""

import numpy as np
import numpy.typing as npt

from dspark.scheduling.arrays import NumberArray, as_numbers


def survival_probabilities(confidence_RK: npt.ArrayLike) -> NumberArray:
    """Survival a [R, K] of conditional confidences c [R, K] in [0, 1]; rows never rise.

    a[r, j] = c[r, 1] * ... * c[r, j].
    """
    survival_RK: NumberArray = np.cumprod(as_numbers(confidence_RK), axis=1)
    return survival_RK
