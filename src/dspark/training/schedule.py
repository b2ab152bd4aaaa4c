"""Which blocks every step and every validation of a run are made of: all ranks know."""

import hashlib
from collections.abc import Sequence

import numpy as np

from dspark.data.packing import BatchStream, PackedBlocks, TrainingSequence, every_block
from dspark.training.config import TrainConfig


def batch_stream(
    sequences: Sequence[TrainingSequence], config: TrainConfig, block_size: int
) -> BatchStream:
    """The batches of a run's steps."""
    return BatchStream(
        sequences,
        anchors_per_batch=config.anchors_per_step,
        anchors_per_sequence=config.anchors_per_sequence,
        block_size=block_size,
        seed=config.seed,
    )


def validation_batches(
    held_out: Sequence[TrainingSequence], config: TrainConfig, block_size: int
) -> list[PackedBlocks]:
    """The same blocks of held-out sequences in every validation."""
    return list(
        every_block(
            held_out,
            anchors_per_batch=config.anchors_per_step,
            anchors_per_sequence=config.validation_anchors,
            block_size=block_size,
        )
    )


def fingerprint(sequences: Sequence[TrainingSequence]) -> str:
    """Of everything that the sequences hold."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence.token_ids).to_bytes(8, "little"))
        digest.update(np.asarray(sequence.token_ids, dtype="<i4").tobytes())
        digest.update(np.packbits(sequence.supervised).tobytes())
    return digest.hexdigest()


def validation_rounds(batches: int, drafters: int) -> Sequence[Sequence[int]]:
    """Which batch each drafter takes in each round. Where there are none left the last one is taken
    again, uncounted: FSDP2 gathers weights in every forward, so none may stay away."""
    return [
        [min(start + drafter, batches - 1) for drafter in range(drafters)]
        for start in range(0, batches, drafters)
    ]
