"""Packs blocks of several sequences into one training batch, without padding.

A batch is a row of context tokens (the sequences' prefixes, one after another, each only as far as
its last anchor sees) and a row of anchors. Which context rows an anchor attends to is a range of
that row: its own sequence's positions 0 .. anchor - 1. So a block cannot see another document, its
own position or anything after it, by construction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.core.errors import DataError
from dspark.data.anchors import (
    BoolArray,
    Int64Array,
    anchor_candidates,
    epoch_order,
    sample_anchors,
    supervised_slots,
)
from dspark.data.template import TokenIds


@dataclass(frozen=True, eq=False, slots=True)
class TrainingSequence:
    token_ids: TokenIds
    """int32 [T], prompt and response."""
    supervised: BoolArray
    """bool [T], the response's tokens."""


@dataclass(frozen=True, eq=False, slots=True)
class PackedBlocks:
    """A anchors of S sequences over N context rows; K slots a block.

    Sequence s owns context rows `context_starts[s]:context_starts[s + 1]` (positions 0, 1, ...) and
    anchors `anchor_starts[s]:anchor_starts[s + 1]`.
    """

    sequences_S: Int64Array
    """Indices into the list of training sequences."""
    context_starts: Int64Array
    """S + 1 offsets into the context rows."""
    anchor_starts: Int64Array
    """S + 1 offsets into the anchors."""
    anchor_positions_A: Int64Array
    previous_AK: Int64Array
    """Teacher-forced token before each slot: the anchor, then the labels shifted by one."""
    labels_AK: Int64Array
    """The token each slot predicts, at position anchor + 1 + k; 0 where unsupervised."""
    supervised_AK: BoolArray

    @property
    def context_ranges_A2(self) -> Int64Array:
        """[A, 2]: the context rows, from and to, each anchor attends to."""
        starts_A = np.repeat(self.context_starts[:-1], np.diff(self.anchor_starts))
        return np.stack([starts_A, starts_A + self.anchor_positions_A], axis=1)


def pack(
    sequences: Sequence[TrainingSequence],
    chosen: Sequence[tuple[int, Int64Array]],
    block_size: int,
) -> PackedBlocks:
    """Packs the anchors `chosen` as (sequence index, ascending anchor positions)."""
    chosen = [(index, anchors) for index, anchors in chosen if len(anchors)]
    assert chosen, "a batch needs at least one anchor"
    previous, labels, supervised = [], [], []
    for index, anchors_A in chosen:
        sequence = sequences[index]
        trained_AK = supervised_slots(sequence.supervised, anchors_A, block_size)
        reach = np.minimum(
            anchors_A[:, None] + np.arange(block_size + 1), len(sequence.token_ids) - 1
        )
        tokens = sequence.token_ids[reach].astype(np.int64)
        previous.append(
            np.where(np.roll(trained_AK, 1, axis=1) | _first(block_size), tokens[:, :-1], 0)
        )
        labels.append(np.where(trained_AK, tokens[:, 1:], 0))
        supervised.append(trained_AK)
    return PackedBlocks(
        sequences_S=np.array([index for index, _ in chosen], dtype=np.int64),
        context_starts=_offsets(int(anchors_A[-1]) for _, anchors_A in chosen),
        anchor_starts=_offsets(len(anchors_A) for _, anchors_A in chosen),
        anchor_positions_A=np.concatenate([anchors_A for _, anchors_A in chosen]),
        previous_AK=np.concatenate(previous),
        labels_AK=np.concatenate(labels),
        supervised_AK=np.concatenate(supervised),
    )


def share_of(packed: PackedBlocks, part: int, parts: int) -> PackedBlocks:
    """One of `parts` equal runs of neighbouring blocks, over the context rows that they see.

    The shares of a batch hold its blocks in order, each once.
    """
    count, rest = divmod(len(packed.anchor_positions_A), parts)
    assert not rest, (len(packed.anchor_positions_A), parts)
    starts = np.clip(packed.anchor_starts - part * count, 0, count)
    kept_S = np.flatnonzero(np.diff(starts))
    blocks = slice(part * count, (part + 1) * count)
    anchor_starts = starts[[*kept_S, kept_S[-1] + 1]]
    positions_A = packed.anchor_positions_A[blocks]
    return PackedBlocks(
        sequences_S=packed.sequences_S[kept_S],
        context_starts=_offsets(iter(positions_A[anchor_starts[1:] - 1].tolist())),
        anchor_starts=anchor_starts,
        anchor_positions_A=positions_A,
        previous_AK=packed.previous_AK[blocks],
        labels_AK=packed.labels_AK[blocks],
        supervised_AK=packed.supervised_AK[blocks],
    )


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the stream of batches stands; all that resuming needs."""

    epoch: int = 0
    index: int = 0
    """Sequences of this epoch's order that are used up."""


class BatchStream:
    """An endless, seeded stream of batches of exactly `anchors_per_batch` anchors."""

    def __init__(
        self,
        sequences: Sequence[TrainingSequence],
        *,
        anchors_per_batch: int,
        anchors_per_sequence: int,
        block_size: int,
        seed: int,
        cursor: Cursor | None = None,
    ) -> None:
        if not any(len(anchor_candidates(s.supervised)) for s in sequences):
            raise DataError("no training sequence has a response; generate some first")
        self.sequences = sequences
        self.anchors_per_batch = anchors_per_batch
        self.anchors_per_sequence = anchors_per_sequence
        self.block_size = block_size
        self.seed = seed
        self.cursor = cursor or Cursor()

    def next_batch(self) -> PackedBlocks:
        """The batch at the cursor; moves the cursor behind it."""
        chosen: list[tuple[int, Int64Array]] = []
        missing = self.anchors_per_batch
        epoch, index = self.cursor.epoch, self.cursor.index
        order = epoch_order(len(self.sequences), seed=self.seed, epoch=epoch)
        while missing:
            if index == len(order):
                epoch, index = epoch + 1, 0
                order = epoch_order(len(self.sequences), seed=self.seed, epoch=epoch)
            sequence = int(order[index])
            anchors = sample_anchors(
                self.sequences[sequence].supervised,
                min(missing, self.anchors_per_sequence),
                seed=self.seed,
                epoch=epoch,
                sequence=sequence,
            )
            chosen.append((sequence, anchors))
            missing -= len(anchors)
            index += 1
        self.cursor = Cursor(epoch, index)
        return pack(self.sequences, chosen, self.block_size)


def every_block(
    sequences: Sequence[TrainingSequence],
    *,
    anchors_per_batch: int,
    anchors_per_sequence: int,
    block_size: int,
) -> Iterator[PackedBlocks]:
    """One fixed pass for validation: evenly spaced anchors of every sequence."""
    chosen: list[tuple[int, Int64Array]] = []
    for index, sequence in enumerate(sequences):
        candidates = anchor_candidates(sequence.supervised)
        keep = np.linspace(0, len(candidates) - 1, min(len(candidates), anchors_per_sequence))
        chosen.append((index, candidates[np.unique(keep.round().astype(np.int64))]))
        if sum(len(anchors) for _, anchors in chosen) >= anchors_per_batch:
            yield pack(sequences, chosen, block_size)
            chosen = []
    if any(len(anchors) for _, anchors in chosen):
        yield pack(sequences, chosen, block_size)


def _first(block_size: int) -> BoolArray:
    first: BoolArray = np.arange(block_size) == 0
    return first


def _offsets(counts: Iterator[int]) -> Int64Array:
    return np.concatenate([[0], np.cumsum(list(counts))]).astype(np.int64)
