"""The captured draft against the eager one. A recorder stands in for CUDA graphs: it replays the
operators of one run on the memory of that run, so nothing of a later round can be read on the way.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.core.random import RequestRandom
from dspark.core.sampling import SamplingParams
from dspark.drafters import captured
from dspark.drafters.captured import CapturedDrafter
from dspark.drafters.serving import DSparkDrafter
from dspark.nn.graphs import Captured, Graphed
from dspark.nn.noise import RequestNoise, Round, StepNoise
from dspark.nn.pages import PageTable
from dspark.nn.recorder import Recorder
from dspark.nn.sampling import race
from dspark.nn.seams import DraftBlock
from tests.drafters.tiny import Served, features, tiny_binding, tiny_config, tiny_model

CONFIG = tiny_config()
BINDING = tiny_binding(CONFIG)
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}
SAMPLING = [
    SamplingParams(seed=3),
    SamplingParams(temperature=0.0),
    SamplingParams(verification="rejection", temperature=0.7, top_k=4),
    SamplingParams(seed=5, temperature=1.3, top_p=0.8),
    SamplingParams(verification="rejection", min_p=0.05),
]
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False},
}


class Counting(Recorder):
    """Counts graphs and replays."""

    def __init__(self) -> None:
        self.graphs = self.replays = 0

    def __call__(self, function: Any) -> Captured:
        self.graphs += 1
        recorded = super().__call__(function)

        def replay() -> None:
            self.replays += 1
            recorded.replay()

        return Captured(replay, recorded.outputs)


def pair(config: Any = CONFIG, **options: Any) -> tuple[Served, CapturedDrafter, Counting]:
    """The eager drafter with a store, and a captured one of the same weights for the same store."""
    model, capture = tiny_model(config), Counting()
    eager = DSparkDrafter(model, BINDING, **options)
    return (
        Served.of(eager, pages=512),
        CapturedDrafter(model, BINDING, capture=capture, **options),
        capture,
    )


def draft(
    drafter: DSparkDrafter,
    served: Served,
    tables: Sequence[PageTable],
    lengths: Sequence[int],
    sampling: Sequence[SamplingParams],
    *,
    number: int = 1,
    adjust: Any = None,
    noise: Any = None,
) -> DraftBlock:
    noises = [RequestNoise(RequestRandom(p.seed or 9), p, 61) for p in sampling]
    rounds = [Round(noise, number, 4) for noise in noises]
    return drafter.draft(
        torch.arange(len(tables)) + 7,
        torch.tensor(lengths),
        tables,
        served.store,
        texts=[[0]] * len(tables),
        sampling=sampling,
        noise=noise or StepNoise(rounds, drafter.block_size),
        adjust=adjust,
    )


def check_equal(got: DraftBlock, expected: DraftBlock) -> None:
    assert torch.equal(got.candidates_RKC, expected.candidates_RKC)
    assert torch.equal(got.tokens_RK, expected.tokens_RK)
    torch.testing.assert_close(got.probs_RKC, expected.probs_RKC, **CLOSE)
    assert (got.confidence_RK is None) == (expected.confidence_RK is None)
    if got.confidence_RK is not None:
        torch.testing.assert_close(got.confidence_RK, expected.confidence_RK, **CLOSE)
        torch.testing.assert_close(got.entropy_RK, expected.entropy_RK, **CLOSE)


@pytest.mark.parametrize("options", [
    {"candidates": 8},
    {"candidates": 0},
    {"candidates": 4, "draft_token_ids": torch.tensor([2, 3, 11, 29, 40, 59])},
], ids=["candidates", "all", "vocabulary"])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_eager_draft_for_any_batch_in_turn(kind: str, options: dict[str, Any]) -> None:
    """Larger, smaller and equal batches, growing contexts, all kinds of sampling, fresh noise."""
    served, own, capture = pair(tiny_config(**KINDS[kind]), **options)
    lengths = [11, 1, 30, 0, 250]
    tables = [served.admit(features(CONFIG, n, seed=n)) for n in lengths]
    batches: list[list[int]] = [[0, 1, 2], [3], [4, 0], [2, 0, 1, 3, 4], [3, 2, 1], [1]]
    for number, chosen in enumerate(batches):
        parts = (
            [tables[r] for r in chosen],
            [lengths[r] for r in chosen],
            [SAMPLING[(r + number) % len(SAMPLING)] for r in chosen],
        )
        expected = draft(served.drafter, served, *parts, number=number)
        check_equal(draft(own, served, *parts, number=number), expected)
    # Backbones: 4, 1, 2 and 8 requests, those with 250 tokens of twice the pages. Loops: by
    # requests, and whether anybody truncates.
    assert sorted(own._backbones[served.store]) == [
        (1, 64, 4), (2, 128, 4), (4, 64, 4), (8, 128, 4)
    ]  # fmt: skip
    assert {requests for requests, _ in own._loops} == {1, 2, 4, 8}
    assert capture.graphs == 4 + len(own._loops) and capture.replays == 2 * len(batches)


def test_the_context_that_grew_since_the_capture_is_seen() -> None:
    served, own, capture = pair(candidates=8)
    taps = features(CONFIG, 12)
    table = served.admit(taps[:5])
    draft(own, served, [table], [5], SAMPLING[:1])
    positions = torch.arange(5, 12)
    served.drafter.extend_context(
        taps[5:], torch.zeros(7).long(), positions, table.slots(5, 12), served.store
    )
    expected = draft(served.drafter, served, [table], [12], SAMPLING[:1])
    check_equal(draft(own, served, [table], [12], SAMPLING[:1]), expected)
    assert capture.graphs == 2


def test_scattered_pages() -> None:
    served, own, _ = pair(candidates=8)
    holes = [served.pool.allocate(4) for _ in range(served.pool.free_pages)]
    for table in holes[::2]:
        served.pool.release(table)
    scattered = served.admit(features(CONFIG, 13))
    assert scattered.first_slot is None
    expected = draft(served.drafter, served, [scattered], [13], SAMPLING[:1])
    check_equal(draft(own, served, [scattered], [13], SAMPLING[:1]), expected)


def test_only_the_blocks_own_slots_are_written() -> None:
    """By three requests after four, too: nobody's rows write to the scratch page."""
    served, own, _ = pair(candidates=8)
    lengths, K = [11, 6, 9, 14], CONFIG.block_size
    tables = [served.admit(features(CONFIG, n, seed=n)) for n in lengths]
    draft(own, served, tables, lengths, SAMPLING[:4])
    memories = (*served.store.keys, *served.store.values)
    blocks = [
        table.slots(length, length + K) for table, length in zip(tables, lengths, strict=True)
    ]
    for memory in memories:  # no trace of the first round is left
        memory[torch.cat(blocks)] = 0.0
    before = [memory.clone() for memory in memories]
    draft(own, served, tables[:3], lengths[:3], SAMPLING[:3])
    for old, memory in zip(before, memories, strict=True):
        changed = (old != memory).flatten(1).any(1).nonzero()[:, 0].tolist()
        inside = [slot for slot in changed if slot < served.store.num_slots]
        assert inside == sorted(torch.cat(blocks[:3]).tolist())


def test_who_needs_the_host_at_every_slot_is_sampled_eagerly() -> None:
    served, own, capture = pair(candidates=8)
    tables, lengths = [served.admit(features(CONFIG, n)) for n in (5, 8)], [5, 8]
    seen: list[list[list[int]]] = []

    def adjust(drafted_Rk: Tensor, ids_RC: Tensor, logits_RC: Tensor) -> Tensor:
        seen.append(drafted_Rk.tolist())
        return logits_RC.masked_fill(ids_RC % 2 == 0, -1e9)

    expected = draft(served.drafter, served, tables, lengths, SAMPLING[:2], adjust=adjust)
    check_equal(draft(own, served, tables, lengths, SAMPLING[:2], adjust=adjust), expected)
    assert seen[:4] == seen[4:] and len(seen) == 8
    assert capture.graphs == 1, "the backbone"
    assert (expected.tokens_RK % 2 == 1).all()


def test_too_much_to_copy_is_attended_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_KEYS", 2 * 256)
    served, own, capture = pair(candidates=8)
    tables, lengths = [served.admit(features(CONFIG, n)) for n in (5, 8, 3)], [5, 8, 3]
    for count, graphs in ((3, 1), (2, 3)):
        parts = tables[:count], lengths[:count], SAMPLING[:count]
        check_equal(draft(own, served, *parts), draft(served.drafter, served, *parts))
        assert capture.graphs == graphs
    assert [*own._backbones[served.store]] == [(2, 64, 4)]


def test_a_shortened_drafter_has_graphs_of_its_own() -> None:
    served, own, _ = pair(candidates=8)
    table = served.admit(features(CONFIG, 5))
    whole = draft(own, served, [table], [5], SAMPLING[:1])
    short = own.shortened(2)
    block = draft(short, served, [table], [5], SAMPLING[:1])
    check_equal(block, draft(served.drafter.shortened(2), served, [table], [5], SAMPLING[:1]))
    assert block.tokens_RK.shape == (1, 2)
    check_equal(draft(own, served, [table], [5], SAMPLING[:1]), whole)


def test_graphs_go_with_their_store() -> None:
    served, own, _ = pair(candidates=8)
    draft(own, served, [served.admit(features(CONFIG, 5))], [5], SAMPLING[:1])
    [graph] = [weakref.ref(graph) for graph in own._backbones[served.store].values()]
    other = Served.of(served.drafter)
    draft(own, other, [other.admit(features(CONFIG, 5))], [5], SAMPLING[:1])
    assert isinstance(graph(), Graphed) and len(own._backbones) == 2
    memory = weakref.ref(served.store.keys[0])
    del served
    gc.collect()
    assert graph() is None and memory() is None and len(own._backbones) == 1


def test_every_token_wins_the_race_over_the_probabilities_it_comes_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a token was sampled from is exactly what it is divided by."""
    assert all(wins_its_race(number) for number in range(12))
    for wrong in (
        lambda probs, noise: race(probs.sqrt(), noise),  # another temperature
        lambda probs, noise: race(probs.clamp(max=0.3), noise),
        lambda probs, noise: race(probs, noise.roll(1, 0)),
    ):  # the neighbour's noise
        monkeypatch.setattr(captured, "race", wrong)
        assert not all(wins_its_race(number) for number in range(12))


def wins_its_race(number: int) -> bool:
    served, own, _ = pair(candidates=16)
    lengths = [11, 1, 30, 0, 25]
    tables = [served.admit(features(CONFIG, n, seed=n)) for n in lengths]
    random = torch.Generator().manual_seed(number)
    drawn: list[Tensor] = []

    def noise(slot: int, ids_RC: Tensor) -> Tensor:
        assert slot == len(drawn)
        exponentials = torch.empty(ids_RC.shape, dtype=torch.float64)
        drawn.append(exponentials.exponential_(generator=random))
        return drawn[-1]

    block = draft(own, served, tables, lengths, SAMPLING, noise=noise)
    winners_RK1 = race(block.probs_RKC, torch.stack(drawn, 1))[:, :, None]
    return torch.equal(block.candidates_RKC.gather(2, winners_RK1)[:, :, 0], block.tokens_RK)
