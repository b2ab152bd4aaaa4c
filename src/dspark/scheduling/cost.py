"""What a step costs: steps per second as a function of the batch's tokens (paper, section 3.2.2).

Theta = tau * SPS(B): expected tokens per step times steps per second is tokens per second. Real
curves are jagged, with cliffs where a kernel's tile is full (section 5.2); nothing is smoothed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from dspark.core.errors import ConfigError
from dspark.scheduling.arrays import NumberArray

Lookup = Literal["exact", "ceil", "floor"]
"""How a batch size between two measured ones is priced:

exact  it may not happen: every size from 1 on is measured;
ceil   like the next larger measured size, as where batches are padded up to it; sizes below the
       first measured one are priced like the first;
floor  like the next smaller measured size, where a new step of the curve begins at a measured size.
"""

LARGEST_BATCH = 2**20
"""Tokens; a table beyond this is a mistake of units."""


@dataclass(frozen=True, slots=True, eq=False)
class SpsCurve:
    """SPS(B) over B = 1 .. max_batch_tokens. Build it with `from_points`."""

    rates: NumberArray
    """Steps per second of B = 1, 2, ... tokens, then one 0, which stands for every larger batch."""

    @classmethod
    def from_points(
        cls,
        batch_tokens: Sequence[int],
        steps_per_second: Sequence[float] | Sequence[Fraction],
        *,
        lookup: Lookup = "exact",
    ) -> "SpsCurve":
        """The curve through measured points; a jagged one is welcome.

        batch_tokens: positive, strictly rising; from 1 on for `exact` (without a gap) and `floor`.
        steps_per_second: positive and finite, one a batch size.

        Raises ConfigError for anything else, and for fewer than two points.
        """
        sizes = _checked_sizes(batch_tokens, lookup)
        rates = _checked_rates(steps_per_second, sizes)
        every_size = np.arange(1, sizes[-1] + 1)
        side: Literal["left", "right"] = "right" if lookup == "floor" else "left"
        points = np.searchsorted(sizes, every_size, side=side) - (lookup == "floor")
        dense = np.append(rates[points], 0)
        dense.setflags(write=False)
        return cls(dense)

    @property
    def max_batch_tokens(self) -> int:
        """The largest measured batch. Beyond it the rate is 0: nothing is ever admitted there."""
        return len(self.rates) - 1

    def __call__(self, batch_tokens: npt.ArrayLike) -> NumberArray:
        """Steps per second at each of `batch_tokens` (integers, at least 1), in their shape."""
        return self.rates.take(np.asarray(batch_tokens) - 1, mode="clip")


def _checked_sizes(batch_tokens: Sequence[int], lookup: Lookup) -> npt.NDArray[np.int64]:
    if lookup not in get_args(Lookup):
        raise ConfigError(f"lookup is {lookup!r}; it must be {', '.join(get_args(Lookup))}")
    if len(batch_tokens) < 2:
        raise ConfigError(
            f"the cost table has {len(batch_tokens)} point(s); it needs at least 2 batch sizes"
        )
    sizes = np.asarray(batch_tokens)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu":
        raise ConfigError("the cost table's batch sizes must be a list of whole numbers of tokens")
    if sizes.min() < 1 or sizes.max() > LARGEST_BATCH:
        raise ConfigError(
            f"the cost table's batch sizes run from {sizes.min()} to {sizes.max()} tokens; "
            f"they must lie in 1..{LARGEST_BATCH}"
        )
    steps = np.diff(sizes)
    if (steps <= 0).any():
        first = int(np.argmax(steps <= 0))
        raise ConfigError(
            f"the cost table has {sizes[first + 1]} tokens after {sizes[first]}; "
            "sort it by batch size, one point a size"
        )
    if lookup != "ceil" and sizes[0] != 1:
        raise ConfigError(f"the cost table starts at {sizes[0]} tokens; measure it from 1")
    if lookup == "exact" and (steps > 1).any():
        first = int(np.argmax(steps > 1))
        raise ConfigError(
            f"the cost table has a gap between {sizes[first]} and {sizes[first + 1]} tokens; "
            "measure every size, or say how sizes between are priced (lookup 'ceil' or 'floor')"
        )
    return sizes.astype(np.int64)


def _checked_rates(
    steps_per_second: Sequence[float] | Sequence[Fraction], sizes: npt.NDArray[np.int64]
) -> NumberArray:
    if len(steps_per_second) != len(sizes):
        raise ConfigError(
            f"the cost table has {len(sizes)} batch sizes and {len(steps_per_second)} rates; "
            "it needs one rate a size"
        )
    exact = all(isinstance(rate, Fraction) for rate in steps_per_second)
    rates: NumberArray = np.array(steps_per_second, dtype=object if exact else np.float64)
    wrong = ~((rates > 0) & (rates < np.inf))  # NaN compares false, so it lands here too
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ConfigError(
            f"the cost table says {rates[first]} steps per second at {sizes[first]} tokens; "
            "rates must be positive and finite; profile again"
        )
    return rates
