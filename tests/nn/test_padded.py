"""The forms of fixed size against the ragged ones that everything else is tested with."""

import pytest
import torch

from dspark.core.sampling import SamplingParams
from dspark.nn.attention import ragged_attention
from dspark.nn.attention_plan import AttentionPlan
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.padded_attention import (
    PaddedPlan,
    padded_attention,
    padded_mask,
    padded_pages,
    page_slots,
    scratch_page,
    scratch_slot,
)
from dspark.nn.padded_sampling import probs_from_rows, sampling_rows, truncates_any
from dspark.nn.pages import PageTable
from dspark.nn.sampling import SamplingRows, probs_from_logits
from dspark.nn.seams import RaggedBatch

PAGE, K = 8, 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("width", [4, 9])
def test_padded_attention_equals_ragged_attention(dtype, width):
    """Neighbours, scattered pages, a page just begun and just full; whatever lies behind them."""
    random = torch.Generator().manual_seed(0)
    store = KVStore(KVShape.uniform(2, 2, 16), 40 * PAGE, read_ahead=PAGE, dtype=dtype)
    for memory in (*store.keys, *store.values):
        memory.copy_(10 * torch.randn(memory.shape, generator=random))
    tables = [PageTable(pages, PAGE) for pages in ([0, 1], [2, 3], [30, 9, 31, 8], [5])]
    ends = [12, 16, 25, 3]
    R = len(tables)
    batch = RaggedBatch(
        tokens_N=torch.zeros(R * K, dtype=torch.int64),
        positions_N=torch.tensor(ends).sub_(1).repeat_interleave(K),
        requests_N=torch.arange(R).repeat_interleave(K),
        slots_N=torch.cat([t.slots(e - K, e) for t, e in zip(tables, ends, strict=True)]),
        starts=tuple(range(0, (R + 1) * K, K)),
        context_lengths=tuple(ends),
        tables=tuple(tables),
        exact=False,
    )
    query = torch.randn(R * K, 4, 16, generator=random, dtype=dtype)
    slots = page_slots(padded_pages(tables, width), PAGE, store)
    assert slots.shape == (R, width * PAGE)
    for r, (table, end) in enumerate(zip(tables, ends, strict=True)):
        assert torch.equal(slots[r, :end], table.slots(0, end))
    mask = padded_mask(torch.tensor(ends)[:, None] - 1, width * PAGE, dtype)
    close = {"atol": 1e-12 if dtype == torch.float64 else 1e-5, "rtol": 0}
    for layer in range(2):
        expected = ragged_attention(query, AttentionPlan.build(batch), store, layer, scale=0.25)
        got = padded_attention(query, slots, mask, store, layer, scale=0.25)
        torch.testing.assert_close(got, expected, **close)
    short = padded_mask(torch.tensor(ends)[:, None] - 2, width * PAGE, dtype)
    other = padded_attention(query, slots, short, store, 1, scale=0.25)
    assert not torch.allclose(other, expected, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("window", [None, 1, 5, 16])
def test_a_padded_plan_equals_a_ragged_one(window, heads, dtype):
    """Rows of a text each see what is before them, in a window or not; runs of several lengths, of
    which the shorter ones repeat their last row."""
    random = torch.Generator().manual_seed(0)
    store = KVStore(KVShape.uniform(1, 2, 16), 40 * PAGE, read_ahead=PAGE, dtype=dtype)
    for memory in (*store.keys, *store.values):
        memory.copy_(10 * torch.randn(memory.shape, generator=random))
    tables = [PageTable(pages, PAGE) for pages in ([0, 1], [2, 3], [30, 9, 31, 8], [5])]
    ends, counts = [12, 16, 25, 3], [3, 1, 2, 3]
    spans = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
    starts = [sum(counts[:r]) for r in range(len(counts) + 1)]
    batch = RaggedBatch(
        tokens_N=torch.zeros(sum(counts), dtype=torch.int64),
        positions_N=torch.cat([torch.arange(*span) for span in spans]),
        requests_N=torch.arange(4).repeat_interleave(torch.tensor(counts)),
        slots_N=torch.cat([t.slots(*span) for t, span in zip(tables, spans, strict=True)]),
        starts=tuple(starts),
        context_lengths=tuple(ends),
        tables=tuple(tables),
        exact=False,
    )
    query = torch.randn(sum(counts), heads, 16, generator=random, dtype=dtype)
    rows = torch.tensor(
        [[starts[r] + min(i, count - 1) for i in range(K)] for r, count in enumerate(counts)]
    )
    plan = PaddedPlan(
        batch.positions_N[rows],
        batch.slots_N[rows].flatten(),
        page_slots(padded_pages(tables, 4), PAGE, store),
    )
    padded = plan.attend(query[rows.flatten()], store, 0, scale=0.25, window=window)
    expected = ragged_attention(
        query, AttentionPlan.build(batch), store, 0, scale=0.25, window=window
    )
    close = {"atol": 1e-12 if dtype == torch.float64 else 1e-5, "rtol": 0}
    torch.testing.assert_close(padded, expected[rows.flatten()], **close)
    others = [5, 16, None] if window == 1 else [1]  # the window shows
    for other in others:
        got = plan.attend(query[rows.flatten()], store, 0, scale=0.25, window=other)
        assert not torch.allclose(got, padded, **close)


def test_pages_that_are_not_there_are_a_requests_own():
    tables = [PageTable([4, 2, 7], 8), PageTable([3], 8)]
    assert padded_pages(tables, 4).tolist() == [[4, 2, 7, 4], [3, 3, 3, 3]]


@pytest.mark.parametrize("read_ahead", [PAGE, 3])
def test_the_scratch_page_is_nobodys_and_in_the_memory(read_ahead):
    store = KVStore(KVShape.uniform(1, 1, 4), 5 * PAGE, read_ahead=read_ahead)
    slots = page_slots(torch.tensor([[scratch_page(store, PAGE)]]), PAGE, store)
    assert slots.min() == store.num_slots and slots.max() == store.num_slots + read_ahead - 1
    assert len(store.keys[0][slots]) == 1
    assert scratch_slot(store) == slots.max()


SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, top_k=2, top_p=0.1, min_p=0.5),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_k=1000),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(top_k=7, top_p=0.6, temperature=2.0),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=9, top_p=0.95, min_p=0.1, temperature=1e-3),
    SamplingParams(top_p=1e-6),
    SamplingParams(temperature=1e-35, top_p=0.5),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("rows", [SAMPLING, SAMPLING[:4], SAMPLING[1:3]], ids=len)
def test_padded_sampling_has_the_same_bits(rows, ties, dtype):
    random = torch.Generator().manual_seed(1)
    for C in (1, 6, 33):
        for _ in range(8):
            logits = 3 * torch.randn(len(rows), C, generator=random, dtype=dtype)
            if ties:
                logits = logits.round()
            expected = probs_from_logits(logits.clone(), SamplingRows.of(rows))
            got = probs_from_rows(logits, sampling_rows(rows), truncated=truncates_any(rows))
            assert torch.equal(got, expected)
    assert truncates_any(rows) == (len(rows) > 4)


def test_numbers_that_are_none_spoil_their_own_row_only():
    logits = torch.randn(len(SAMPLING), 5, dtype=torch.float64)
    logits[7] = float("nan")
    got = probs_from_rows(logits, sampling_rows(SAMPLING), truncated=True)
    fine = [r for r in range(len(SAMPLING)) if r != 7]
    assert torch.isfinite(got[fine]).all() and got[7].isnan().all()
