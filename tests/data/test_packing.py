"""Anchors and packing against their definitions, spelled out position by position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.errors import DataError
from dspark.data.anchors import anchor_candidates, sample_anchors, supervised_slots
from dspark.data.packing import (
    BatchStream,
    Cursor,
    PackedBlocks,
    TrainingSequence,
    every_block,
    pack,
)

K = 3
masks = st.lists(st.booleans(), min_size=2, max_size=24).map(np.array)


def _sequence(mask: np.ndarray, first: int = 0) -> TrainingSequence:
    return TrainingSequence(np.arange(first, first + len(mask), dtype=np.int32), mask)


def _supervised(mask: np.ndarray, anchor: int, slot: int) -> bool:
    return all(anchor + 1 + k < len(mask) and mask[anchor + 1 + k] for k in range(slot + 1))


@given(masks, st.integers(1, 30), st.integers(0, 5))
def test_anchors_are_valid_sorted_distinct_and_repeatable(
    mask: np.ndarray, count: int, epoch: int
) -> None:
    anchors = sample_anchors(mask, count, seed=1, epoch=epoch, sequence=3)
    assert len(anchors) == min(count, len(anchor_candidates(mask)))
    assert (np.diff(anchors) > 0).all()
    assert all(mask[a + 1] for a in anchors)
    again = sample_anchors(mask, count, seed=1, epoch=epoch, sequence=3)
    assert np.array_equal(anchors, again)


def test_last_prompt_token_is_a_candidate_and_the_last_token_is_not() -> None:
    assert anchor_candidates(np.array([0, 0, 1, 1, 1], dtype=bool)).tolist() == [1, 2, 3]


def test_anchors_are_uniform_and_differ_by_epoch_sequence_and_seed() -> None:
    mask = np.array([False] + [True] * 20)
    counts = np.zeros(20)
    for epoch in range(2000):
        counts[sample_anchors(mask, 5, seed=0, epoch=epoch, sequence=0)] += 1
    assert abs(counts / 2000 - 0.25).max() < 0.05  # five standard deviations
    draws = {
        tuple(sample_anchors(mask, 5, seed=seed, epoch=epoch, sequence=sequence))
        for seed in range(3) for epoch in range(3) for sequence in range(3)
    }  # fmt: skip
    assert len(draws) >= 26


@given(masks)
def test_supervision_stops_at_the_first_gap(mask: np.ndarray) -> None:
    anchors = anchor_candidates(mask)
    ours = supervised_slots(mask, anchors, K)
    expected = [[_supervised(mask, a, k) for k in range(K)] for a in anchors]
    assert ours.tolist() == expected


@given(st.lists(masks, min_size=1, max_size=5), st.integers(1, 6))
def test_packed_rows_mean_what_they_say(all_masks: list[np.ndarray], count: int) -> None:
    sequences = [_sequence(mask, 100 * i) for i, mask in enumerate(all_masks)]
    chosen = [
        (i, sample_anchors(s.supervised, count, seed=0, epoch=0, sequence=i))
        for i, s in enumerate(sequences)
    ]
    if not any(len(anchors) for _, anchors in chosen):
        return
    packed = pack(sequences, chosen, K)
    context = [  # (sequence, position) of every context row
        (int(index), position)
        for s, index in enumerate(packed.sequences_S)
        for position in range(packed.context_starts[s + 1] - packed.context_starts[s])
    ]
    flat = [(i, int(a)) for i, anchors in chosen for a in anchors]
    assert len(flat) == len(packed.anchor_positions_A)
    used = set()
    for row, (i, anchor) in enumerate(flat):
        tokens, mask = sequences[i].token_ids, sequences[i].supervised
        assert packed.anchor_positions_A[row] == anchor
        start, end = packed.context_ranges_A2[row]
        # Its own document, everything before it, and nothing else.
        assert context[start:end] == [(i, position) for position in range(anchor)]
        used.update(range(start, end))
        for k in range(K):
            supervised = _supervised(mask, anchor, k)
            assert packed.supervised_AK[row, k] == supervised
            if supervised:
                assert packed.labels_AK[row, k] == tokens[anchor + 1 + k]
                assert packed.previous_AK[row, k] == tokens[anchor + k]
    assert used == set(range(len(context))), "every context row is seen by some anchor"


def _corpus() -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    return [
        _sequence(np.arange(n) >= n // 3, int(1000 * i))
        for i, n in enumerate(rng.integers(5, 40, size=9))
    ]


def _stream(cursor: Cursor | None = None) -> BatchStream:
    return BatchStream(
        _corpus(), anchors_per_batch=13, anchors_per_sequence=5, block_size=K, seed=4, cursor=cursor
    )


def _key(packed: PackedBlocks) -> bytes:
    return b"".join(getattr(packed, name).tobytes() for name in PackedBlocks.__slots__)


def test_stream_is_exactly_resumable_and_of_constant_size() -> None:
    stream = _stream()
    cursors, batches = [], []
    for _ in range(20):
        cursors.append(stream.cursor)
        batches.append(stream.next_batch())
    assert {len(b.anchor_positions_A) for b in batches} == {13}
    assert cursors[-1].epoch >= 3
    for start in (1, 7, 19):
        assert _key(_stream(cursors[start]).next_batch()) == _key(batches[start])


def test_an_epoch_visits_every_sequence_once() -> None:
    stream = _stream()
    visits: list[int] = []
    while stream.cursor.epoch == 0:
        visits += stream.next_batch().sequences_S.tolist()
    assert sorted(visits[:9]) == list(range(9))


def test_validation_blocks_are_fixed_and_cover_every_sequence() -> None:
    def batches() -> list[PackedBlocks]:
        return list(
            every_block(_corpus(), anchors_per_batch=13, anchors_per_sequence=5, block_size=K)
        )

    first = batches()
    assert [_key(b) for b in first] == [_key(b) for b in batches()]
    assert sorted(i for b in first for i in b.sequences_S) == list(range(9))


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(DataError, match="no training sequence has a response"):
        BatchStream(
            [_sequence(np.zeros(4, dtype=bool))],
            anchors_per_batch=2, anchors_per_sequence=2, block_size=K, seed=0,
        )  # fmt: skip
