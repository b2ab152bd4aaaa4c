"""From confidence logits to conditional confidences (paper, equation 7 and section 3.2.1).

The confidence head's c_k estimates that position k is accepted *given* that every earlier position
of the block was. It reads the token before position k, never the token at k. The entropy of what
position k is drawn from reads the tokens before it, too, and is a second piece of evidence.
Calibration joins both position by position, on the conditional c: survival, its cumulative product,
can only fall along a block, whatever was fitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from dspark.calibration.arrays import FloatArray
from dspark.core.errors import ConfigError, DSparkError

# exp overflows beyond 709; there the confidence is 0 or 1 to double precision anyway.
_LARGEST_LOGIT = 700.0


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """What is made of the logits: c_k = sigmoid(logit_k / temperature_k + offset_k + weight_k H_k),
    where H_k is the entropy of the draft's distribution (`DraftBlock.entropy_RK`).

    The paper's calibration is the temperature alone. It cannot move a head that is too sure of
    everything, which the offset can; neither can tell rounds apart that the head cannot, which
    entropy can (docs/architecture.md).

    Raises ConfigError for temperatures that are not positive, or numbers that are not finite.
    """

    temperatures: FloatArray
    """[K], or [R, K] where rows differ."""
    offsets: FloatArray
    """Of the same shape, in logits."""
    entropy_weights: FloatArray
    """Of the same shape, in logits per nat; 0 leaves entropy out."""

    def __post_init__(self) -> None:
        for item in fields(self):
            values = np.asarray(getattr(self, item.name), dtype=np.float64)
            object.__setattr__(self, item.name, values)
        if not self.temperatures.shape == self.offsets.shape == self.entropy_weights.shape:
            raise ConfigError(
                f"calibration holds {self.temperatures.shape[-1]} temperatures, "
                f"{self.offsets.shape[-1]} offsets and {self.entropy_weights.shape[-1]} entropy "
                "weights; calibrate this bundle again"
            )
        if not (np.isfinite(self.temperatures) & (self.temperatures > 0)).all():
            raise ConfigError(
                f"calibration temperatures are {self.temperatures.tolist()}; each must be positive "
                "and finite; calibrate this bundle again"
            )
        for name, values in (("offsets", self.offsets), ("entropy weights", self.entropy_weights)):
            if not np.isfinite(values).all():
                raise ConfigError(
                    f"calibration {name} are {values.tolist()}; each must be finite; calibrate "
                    "this bundle again"
                )

    @classmethod
    def identity(cls, block_size: int) -> Self:
        """The head as it is."""
        return cls.of_temperatures(np.ones(block_size))

    @classmethod
    def of_temperatures(cls, temperatures: npt.ArrayLike) -> Self:
        """The paper's."""
        values = np.asarray(temperatures, dtype=np.float64)
        return cls(values, np.zeros_like(values), np.zeros_like(values))

    @classmethod
    def rows(cls, scalings: Sequence[Self]) -> Self:
        """[R, K] of R scalings [K]."""
        parts = ([getattr(own, item.name) for own in scalings] for item in fields(cls))
        return cls(*(np.array(part) for part in parts))

    @property
    def block_size(self) -> int:
        return int(self.temperatures.shape[-1]) if self.temperatures.ndim else 0

    def first(self, positions: int) -> Self:
        """That of blocks cut short, whose positions keep theirs."""
        return type(self)(*(getattr(self, item.name)[..., :positions] for item in fields(self)))

    def with_first(self, fitted: Self) -> Self:
        """`fitted` [k] at its positions, and this one's behind them."""
        parts = ((getattr(fitted, item.name), getattr(self, item.name)) for item in fields(self))
        count = fitted.block_size
        return type(self)(*(np.concatenate([new, old[count:]]) for new, old in parts))

    def confidence(self, logits_RK: npt.ArrayLike, entropies_RK: npt.ArrayLike) -> FloatArray:
        """Calibrated conditional confidences c [R, K] of raw logits and entropies.

        Raises ConfigError if it is for another block size, DSparkError for NaN.
        """
        logits = np.asarray(logits_RK, dtype=np.float64)
        check_block_size(self, logits.shape[1])
        scaled = logits / self.temperatures + self.offsets
        return conditional_confidence(scaled + self.entropy_weights * np.asarray(entropies_RK))


def conditional_confidence(logits_RK: npt.ArrayLike) -> FloatArray:
    """Conditional acceptance probabilities c [R, K] in [0, 1], float64, of logits as they are.

    Raises DSparkError for NaN.
    """
    logits = np.asarray(logits_RK, dtype=np.float64)
    if np.isnan(logits).any():
        raise DSparkError("the drafter's confidence logits are NaN; check the bundle's weights")
    bounded: FloatArray = np.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT)
    return 1.0 / (1.0 + np.exp(-bounded))


def check_block_size(scaling: Scaling, block_size: int) -> None:
    """ConfigError unless it is for blocks of this many tokens."""
    if scaling.block_size != block_size:
        raise ConfigError(
            f"calibration is for blocks of {scaling.block_size}; the drafter's block is "
            f"{block_size}; calibrate this bundle again"
        )
