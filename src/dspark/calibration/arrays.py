"""The arrays of this room.

Shape legend:
    R  requests of the round      K  block size: draft tokens proposed per round and request
    N  rounds of a sample         P  prompts of a sample
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
