"""From confidence logits to survival probabilities (paper, equation 7 and section 3.2.2).

The confidence head's c_k estimates that position k is accepted *given* that every earlier position
of the block was. It reads the token before position k, never the token at k. Survival is the
probability that the whole prefix is accepted: a[r, j] = c[r, 1] * ... * c[r, j].
"""

import numpy as np
import numpy.typing as npt

from dspark.core.errors import ConfigError, DSparkError
from dspark.scheduling.arrays import FloatArray, NumberArray, as_numbers

# exp overflows beyond 709; there the confidence is 0 or 1 to double precision anyway.
_LARGEST_LOGIT = 700.0


def conditional_confidence(
    logits_RK: npt.ArrayLike, temperatures_K: npt.ArrayLike | None = None
) -> FloatArray:
    """Conditional acceptance probabilities c [R, K] in [0, 1], float64, from raw confidence logits.

    `temperatures_K` divides the logits of each position (sequential temperature scaling, section
    3.2.1); None means 1. Scaling acts on the conditional c, so that survival can only fall along
    the block, whatever the temperatures.

    Raises ConfigError for temperatures of another block size or not positive, DSparkError for NaN
    logits.
    """
    logits = np.asarray(logits_RK, dtype=np.float64)
    if np.isnan(logits).any():
        raise DSparkError("the drafter's confidence logits are NaN; check the bundle's weights")
    if temperatures_K is not None:
        logits = logits / _checked_temperatures(temperatures_K, block_size=logits.shape[1])
    bounded: FloatArray = np.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT)
    return 1.0 / (1.0 + np.exp(-bounded))


def survival_probabilities(confidence_RK: npt.ArrayLike) -> NumberArray:
    """Survival a [R, K] of conditional confidences c [R, K] in [0, 1]; rows never rise."""
    survival_RK: NumberArray = np.cumprod(as_numbers(confidence_RK), axis=1)
    return survival_RK


def _checked_temperatures(temperatures_K: npt.ArrayLike, *, block_size: int) -> FloatArray:
    temperatures = np.asarray(temperatures_K, dtype=np.float64)
    if temperatures.shape != (block_size,):
        raise ConfigError(
            f"calibration holds {temperatures.size} temperatures; the drafter's block is "
            f"{block_size}; calibrate this bundle again"
        )
    if not (np.isfinite(temperatures) & (temperatures > 0)).all():
        raise ConfigError(
            f"calibration temperatures are {temperatures.tolist()}; "
            "each must be positive and finite; calibrate this bundle again"
        )
    return temperatures
