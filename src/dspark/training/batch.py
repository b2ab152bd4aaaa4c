"""A packed batch as tensors: what one training step reads."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dspark.data.anchors import Int64Array
from dspark.data.packing import PackedBlocks, TrainingSequence
from dspark.data.template import TokenIds
from dspark.drafters.model import Blocks


class Features(Protocol):
    """What the target makes of a sequence, bfloat16: a `FeatureStore`, or what teachers send.

    `load_batch` asks for each sequence of a batch in order, for its context and then its states.
    """

    def context(self, token_ids: TokenIds, count: int) -> Tensor:
        """Taps [count, F] of positions 0 .. count - 1."""

    def final(self, token_ids: TokenIds, positions_M: Int64Array) -> Tensor:
        """Final hidden states [M, D] at the given positions."""


@dataclass(frozen=True, slots=True)
class Batch(Blocks):
    """A blocks of K slots over N context rows; M of the A * K slots are supervised."""

    labels_AK: Tensor
    supervised_AK: Tensor
    slots_M: Tensor
    """The supervised slots as a * K + k, in the order of the states that predict their labels."""
    teacher_UD: Tensor
    """The target's final hidden states at those positions, each once, bfloat16."""
    teacher_rows_M: Tensor
    """Row of `teacher_UD` for each of `slots_M`: ascending without gaps."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same numbers there: the one place where those of a step change devices."""
        device = torch.device(device)
        # Whoever reads on the host must wait for them; a device keeps the order by itself.
        ahead = device.type != "cpu"
        moved = {
            item.name: getattr(self, item.name).to(device, non_blocking=ahead)
            for item in fields(self)
        }
        return Batch(**moved)


def slot_sources(packed: PackedBlocks, s: int) -> Int64Array:
    """Positions whose states predict the supervised slots of sequence s of the batch, slot by slot:
    slot k predicts token anchor + 1 + k, which the state at position anchor + k sees coming."""
    blocks = slice(packed.anchor_starts[s], packed.anchor_starts[s + 1])
    K = packed.supervised_AK.shape[1]
    positions_AK: Int64Array = packed.anchor_positions_A[blocks, None] + np.arange(K)
    return positions_AK[packed.supervised_AK[blocks]]


def load_batch(
    packed: PackedBlocks,
    sequences: Sequence[TrainingSequence],
    features: Features,
    device: torch.device | str = "cpu",
) -> Batch:
    """Reads the rows of a packed batch, and no others, from the features; they go to `device`."""
    contexts, followers, teachers, slots, teacher_rows = [], [], [], [], []
    lengths = np.diff(packed.context_starts)
    K = packed.supervised_AK.shape[1]
    found = 0
    for s, index in enumerate(packed.sequences_S):
        ids = sequences[index].token_ids
        contexts.append(features.context(ids, int(lengths[s])))
        followers.append(ids[1 : lengths[s] + 1].astype(np.int64))
        first, last = packed.anchor_starts[s], packed.anchor_starts[s + 1]
        chosen = np.flatnonzero(packed.supervised_AK[first:last])
        sources = slot_sources(packed, s)
        order = np.argsort(sources, kind="stable")
        unique, inverse = np.unique(sources[order], return_inverse=True)
        slots.append(first * K + chosen[order])
        teacher_rows.append(found + inverse)
        teachers.append(features.final(ids, unique))
        found += len(unique)
    ranges_A2 = packed.context_ranges_A2
    rows_N = np.arange(packed.context_starts[-1])
    visible_AN = (rows_N >= ranges_A2[:, :1]) & (rows_N < ranges_A2[:, 1:])
    positions = [np.arange(length) for length in lengths]
    return Batch(
        context_NF=torch.cat(contexts),
        context_positions_N=torch.from_numpy(np.concatenate(positions)),
        context_next_N=torch.from_numpy(np.concatenate(followers)),
        visible_AN=torch.from_numpy(visible_AN),
        anchors_A=torch.from_numpy(packed.previous_AK[:, 0].copy()),
        anchor_positions_A=torch.from_numpy(packed.anchor_positions_A),
        previous_AK=torch.from_numpy(packed.previous_AK),
        labels_AK=torch.from_numpy(packed.labels_AK),
        supervised_AK=torch.from_numpy(packed.supervised_AK),
        slots_M=torch.from_numpy(np.concatenate(slots)),
        teacher_UD=torch.cat(teachers),
        teacher_rows_M=torch.from_numpy(np.concatenate(teacher_rows)),
    ).to(device)
