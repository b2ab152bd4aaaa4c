"""The arrays of this room.

Shape legend:
    R  requests of the round    K  block size: draft tokens proposed per round and request

Positions are 1-based in prose, as in the paper: position j of a request is column j - 1.

Survival and SPS are float64 in service. Every function of the room also takes object arrays of
`fractions.Fraction`, so that the laws are asserted without rounding, on the code that serves.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
NumberArray = npt.NDArray[Any]
"""float64, or object holding `fractions.Fraction`."""


def as_numbers(values: npt.ArrayLike) -> NumberArray:
    """float64, except that exact numbers stay as they are."""
    array = np.asarray(values)
    return array if array.dtype == object else array.astype(np.float64, copy=False)
