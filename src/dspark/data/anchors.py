"""Where blocks start in a sequence, and what of a block is supervised (DESIGN section 5)."""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def anchor_candidates(supervised_T: BoolArray) -> Int64Array:
    """Positions whose next token is supervised, the last prompt token included."""
    return np.flatnonzero(supervised_T[1:]).astype(np.int64)


def sample_anchors(
    supervised_T: BoolArray, count: int, *, seed: int, epoch: int, sequence: int
) -> Int64Array:
    """At most `count` anchors, uniform without replacement, ascending.

    A pure function of (seed, epoch, sequence): nothing else that is drawn can move it.
    """
    candidates = anchor_candidates(supervised_T)
    if len(candidates) <= count:
        return candidates
    chosen = generator(seed, epoch, sequence + 1).choice(len(candidates), size=count, replace=False)
    return candidates[np.sort(chosen)]


def supervised_slots(supervised_T: BoolArray, anchors_A: Int64Array, block_size: int) -> BoolArray:
    """bool [A, K]: slot k is trained when tokens anchor + 1 .. anchor + 1 + k are all supervised.

    Supervision stops at the first token that is not: what follows a gap was not written after this
    block.
    """
    positions_AK = anchors_A[:, None] + 1 + np.arange(block_size)
    inside_AK = positions_AK < len(supervised_T)
    trained_AK = inside_AK & supervised_T[np.minimum(positions_AK, len(supervised_T) - 1)]
    return np.logical_and.accumulate(trained_AK, axis=1)


def epoch_order(count: int, *, seed: int, epoch: int) -> Int64Array:
    """The order in which an epoch visits `count` sequences."""
    return generator(seed, epoch, 0).permutation(count)


def generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """numpy's Philox advances counter[0] as it draws; the other words name the stream."""
    return np.random.Generator(
        np.random.Philox(
            key=np.array([seed, 0], dtype=np.uint64),
            counter=np.array([0, stream, epoch, 0], dtype=np.uint64),
        )
    )
