"""From confidence logits to conditional confidences (paper, equation 7 and section 3.2.1).

The confidence head's c_k estimates that position k is accepted *given* that every earlier position
of the block was. It reads the token before position k, never the token at k. Temperatures divide
its logits position by position; they act on the conditional c, so that survival, its cumulative
product, can only fall along a block, whatever they are.
"""

import numpy as np
import numpy.typing as npt

from dspark.calibration.arrays import FloatArray
from dspark.core.errors import ConfigError, DSparkError

# exp overflows beyond 709; there the confidence is 0 or 1 to double precision anyway.
_LARGEST_LOGIT = 700.0


def conditional_confidence(
    logits_RK: npt.ArrayLike, temperatures: npt.ArrayLike | None = None
) -> FloatArray:
    """Conditional acceptance probabilities c [R, K] in [0, 1], float64, from raw confidence logits.

    temperatures: [K], or [R, K] where rows differ; None means 1.

    Raises ConfigError for temperatures of another block size or not positive, DSparkError for NaN
    logits.
    """
    logits = np.asarray(logits_RK, dtype=np.float64)
    if np.isnan(logits).any():
        raise DSparkError("the drafter's confidence logits are NaN; check the bundle's weights")
    if temperatures is not None:
        logits = logits / checked_temperatures(temperatures, block_size=logits.shape[1])
    bounded: FloatArray = np.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT)
    return 1.0 / (1.0 + np.exp(-bounded))


def checked_temperatures(temperatures: npt.ArrayLike, *, block_size: int) -> FloatArray:
    """The temperatures as float64; ConfigError unless there are `block_size` (a row) and each is
    positive and finite."""
    values = np.asarray(temperatures, dtype=np.float64)
    count = values.shape[-1] if values.ndim else 0
    if count != block_size:
        raise ConfigError(
            f"calibration holds {count} temperatures; the drafter's block is {block_size}; "
            "calibrate this bundle again"
        )
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(
            f"calibration temperatures are {values.tolist()}; "
            "each must be positive and finite; calibrate this bundle again"
        )
    return values
