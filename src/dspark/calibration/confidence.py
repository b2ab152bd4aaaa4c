"""From confidence logits to conditional confidences (paper, equation 7 and section 3.2.1).

The confidence head's c_k estimates that position k is accepted *given* that every earlier position
of the block was. It reads the token before position k, never the token at k. Calibration acts on
its logits position by position, so on the conditional c: survival, its cumulative product, can only
fall along a block, whatever was fitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from dspark.calibration.arrays import FloatArray
from dspark.core.errors import ConfigError, DSparkError

# exp overflows beyond 709; there the confidence is 0 or 1 to double precision anyway.
_LARGEST_LOGIT = 700.0


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """What is done to the logits: c_k = sigmoid(logit_k / temperature_k + offset_k).

    The paper's calibration is the temperature alone. It cannot move a head that is too sure of
    everything, which the offset can (docs/architecture.md).

    Raises ConfigError for temperatures that are not positive, or numbers that are not finite.
    """

    temperatures: FloatArray
    """[K], or [R, K] where rows differ."""
    offsets: FloatArray
    """Of the same shape, in logits."""

    def __post_init__(self) -> None:
        for name in ("temperatures", "offsets"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        if self.temperatures.shape != self.offsets.shape:
            raise ConfigError(
                f"calibration holds {self.temperatures.shape[-1]} temperatures and "
                f"{self.offsets.shape[-1]} offsets; calibrate this bundle again"
            )
        if not (np.isfinite(self.temperatures) & (self.temperatures > 0)).all():
            raise ConfigError(
                f"calibration temperatures are {self.temperatures.tolist()}; each must be positive "
                "and finite; calibrate this bundle again"
            )
        if not np.isfinite(self.offsets).all():
            raise ConfigError(
                f"calibration offsets are {self.offsets.tolist()}; each must be finite; calibrate "
                "this bundle again"
            )

    @classmethod
    def identity(cls, block_size: int) -> Self:
        """The head as it is."""
        return cls(np.ones(block_size), np.zeros(block_size))

    @classmethod
    def of_temperatures(cls, temperatures: npt.ArrayLike) -> Self:
        """The paper's."""
        values = np.asarray(temperatures, dtype=np.float64)
        return cls(values, np.zeros_like(values))

    @classmethod
    def rows(cls, scalings: Sequence[Self]) -> Self:
        """[R, K] of R scalings [K]."""
        return cls(
            np.array([own.temperatures for own in scalings]),
            np.array([own.offsets for own in scalings]),
        )

    @property
    def block_size(self) -> int:
        return int(self.temperatures.shape[-1]) if self.temperatures.ndim else 0

    def first(self, positions: int) -> Self:
        """That of blocks cut short, whose positions keep theirs."""
        return type(self)(self.temperatures[..., :positions], self.offsets[..., :positions])


def conditional_confidence(logits_RK: npt.ArrayLike, scaling: Scaling | None = None) -> FloatArray:
    """Conditional acceptance probabilities c [R, K] in [0, 1], float64, from raw confidence logits.

    scaling: None takes them as they are.

    Raises ConfigError for a scaling of another block size, DSparkError for NaN logits.
    """
    logits = np.asarray(logits_RK, dtype=np.float64)
    if np.isnan(logits).any():
        raise DSparkError("the drafter's confidence logits are NaN; check the bundle's weights")
    if scaling is not None:
        check_block_size(scaling, logits.shape[1])
        logits = logits / scaling.temperatures + scaling.offsets
    bounded: FloatArray = np.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT)
    return 1.0 / (1.0 + np.exp(-bounded))


def check_block_size(scaling: Scaling, block_size: int) -> None:
    """ConfigError unless it is for blocks of this many tokens."""
    if scaling.block_size != block_size:
        raise ConfigError(
            f"calibration is for blocks of {scaling.block_size}; the drafter's block is "
            f"{block_size}; calibrate this bundle again"
        )
