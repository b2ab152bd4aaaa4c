"""Ragged attention against its plain twin and against a definition in a few lines."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.nn.attention import KEY_TILE, attention_is_exact, plain_attention, ragged_attention
from dspark.nn.attention_plan import AttentionPlan
from dspark.nn.kv_cache import KVShape
from dspark.nn.pages import PagePool
from dspark.nn.query_tile import TILES, measure_query_tile
from tests.targets.ragged import garbage_store, make_batch, scattered


def by_definition(query_NHD, batch, store, scale, window, softcap=None, sinks=None):
    """Row by row and head by head, in float64."""
    out = []
    for r, table in enumerate(batch.tables):
        for row in range(batch.starts[r], batch.starts[r + 1]):
            position = int(batch.positions_N[row])
            first = 0 if window is None else max(0, position - window + 1)
            slots = table.slots(first, position + 1)
            heads = []
            for head in range(query_NHD.shape[1]):
                kv = head // (query_NHD.shape[1] // store.shape.heads[0])
                keys, values = store.keys[0][slots, kv], store.values[0][slots, kv]
                scores = keys.double() @ query_NHD[row, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = scores.softmax(0)[: len(slots)]
                heads.append(weights @ values.double())
            out.append(torch.stack(heads))
    return torch.stack(out).float()


def build(spans, page_size, kv_heads, dims, *, exact, scatter_seed=None, seed=0):
    """A batch of (cached, new) spans whose keys are random, in a store full of garbage."""
    capacity = [cached + new for cached, new in spans]
    pages = sum(-(-tokens // page_size) for tokens in capacity) + 3
    pool = PagePool(pages, page_size)
    shape = KVShape((kv_heads,), (dims[0],), (dims[1],))
    store = garbage_store(shape, pages * page_size, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tables = []
    for index, tokens in enumerate(capacity):
        # Some of the requests scattered: groups must end there.
        if scatter_seed is not None and (scatter_seed + index) % 3 == 0:
            tables.append(scattered(pool, tokens, generator))
        else:
            tables.append(pool.allocate(tokens))
    for table, tokens in zip(tables, capacity, strict=True):
        slots = table.slots(0, tokens)
        keys = torch.randn(tokens, kv_heads, dims[0], generator=generator)
        values = torch.randn(tokens, kv_heads, dims[1], generator=generator)
        store.write(0, slots, keys, values)
    runs = [(t, cached, [0] * new) for t, (cached, new) in zip(tables, spans, strict=True)]
    return make_batch(runs, exact=exact), store


SPANS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 20), st.integers(KEY_TILE - 7, KEY_TILE + 8)), st.integers(1, 9)
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    spans=SPANS,
    page_size=st.sampled_from([1, 4, 16, 520]),
    kv_heads=st.integers(1, 2),
    heads_per_kv=st.integers(1, 3),
    window=st.sampled_from([None, 1, 5, 600]),
    exact=st.booleans(),
    scatter_seed=st.sampled_from([None, 0, 1, 2]),
)
def test_ragged_is_plain(spans, page_size, kv_heads, heads_per_kv, window, exact, scatter_seed):
    batch, store = build(spans, page_size, kv_heads, (8, 8), exact=exact, scatter_seed=scatter_seed)
    query = torch.randn(
        batch.starts[-1], kv_heads * heads_per_kv, 8, generator=torch.Generator().manual_seed(3)
    )
    plan = AttentionPlan.build(batch)
    ragged = ragged_attention(query, plan, store, 0, scale=0.4, window=window)
    plain = plain_attention(query, plan, store, 0, scale=0.4, window=window)
    torch.testing.assert_close(ragged, plain, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_both_are_the_definition(window, exact):
    spans = [(0, 4), (0, 4), (17, 1), (5, 3), (510, 4)]
    batch, store = build(spans, 4, 2, (8, 8), exact=exact, scatter_seed=0)
    query = torch.randn(batch.starts[-1], 6, 8, generator=torch.Generator().manual_seed(3))
    expected = by_definition(query, batch, store, 0.4, window)
    plan = AttentionPlan.build(batch)
    for attention in (ragged_attention, plain_attention):
        got = attention(query, plan, store, 0, scale=0.4, window=window)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
def test_softcap_and_sinks(exact):
    spans = [(0, 70), (17, 1), (510, 4)]  # 70 rows: more than one block of plain attention
    batch, store = build(spans, 4, 2, (8, 8), exact=exact)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(batch.starts[-1], 6, 8, generator=generator)
    sinks = torch.randn(6, generator=generator)
    got = plain_attention(
        query, AttentionPlan.build(batch), store, 0, scale=0.9, window=9, softcap=2.0, sinks_H=sinks
    )
    expected = by_definition(query, batch, store, 0.9, 9, softcap=2.0, sinks=sinks)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_values_narrower_than_keys():
    batch, store = build([(3, 2), (9, 5)], 4, 2, (12, 4), exact=True)
    query = torch.randn(7, 4, 12, generator=torch.Generator().manual_seed(3))
    expected = by_definition(query, batch, store, 0.3, None)
    for attention in (ragged_attention, plain_attention):
        got = attention(query, AttentionPlan.build(batch), store, 0, scale=0.3)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_neighbours_at_a_constant_stride_share_a_call():
    even, _ = build([(8, 1)] * 5, 16, 1, (8, 8), exact=True)
    assert [group.requests for group in AttentionPlan.build(even).groups] == [range(5)]
    # Other query counts, other strides and other key tiles each end a group.
    mixed, _ = build([(8, 1), (8, 2), (8, 2), (30, 2), (8, 2)], 16, 1, (8, 8), exact=True)
    groups = [group.requests for group in AttentionPlan.build(mixed).groups]
    assert groups == [range(1), range(1, 4), range(4, 5)]
    tiles, _ = build([(8, 1), (600, 1), (8, 1)], 640, 1, (8, 8), exact=True)
    assert len(AttentionPlan.build(tiles).groups) == 3


def test_the_last_request_of_a_full_store_reads_inside_it():
    """Its padded keys end beyond the last page, in the read-ahead; nothing there may matter."""
    pool = PagePool(3, 4)
    tables = [pool.allocate(4) for _ in range(3)]
    store = garbage_store(KVShape.uniform(1, 1, 8), 12)
    batch = make_batch([(table, 0, [0] * 4) for table in tables], exact=True)
    query = torch.randn(12, 1, 8, generator=torch.Generator().manual_seed(3))
    got = ragged_attention(query, AttentionPlan.build(batch), store, 0, scale=1.0)
    for memory in (*store.keys, *store.values):
        memory[12:] = 1e30
    again = ragged_attention(query, AttentionPlan.build(batch), store, 0, scale=1.0)
    assert torch.equal(got, again) and got.isfinite().all()


@pytest.mark.parametrize("attention", [ragged_attention, plain_attention])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rows_are_exact_in_any_company(attention, head_dim):
    fused = attention is ragged_attention
    shape = KVShape.uniform(1, 2, head_dim)
    if not attention_is_exact(shape, torch.float32, fused=fused):
        pytest.skip("this machine has no exact tile")
    generator = torch.Generator().manual_seed(1)
    tokens = 530
    pool = PagePool(300, 4)
    store = garbage_store(shape, 1200)
    table, other = pool.allocate(tokens), pool.allocate(tokens)
    for own in (table, other):
        fresh = torch.randn(2, tokens, 2, head_dim, generator=generator)
        store.write(0, own.slots(0, tokens), fresh[0], fresh[1])
    query = torch.randn(tokens, 4, head_dim, generator=generator)

    def rows(start, end, company):
        runs = [(table, start, [0] * (end - start))]
        queries = [query[start:end]]
        if company:
            runs.append((other, 100, [0] * company))
            queries.append(query[100 : 100 + company])
        plan = AttentionPlan.build(make_batch(runs, exact=True))
        return attention(torch.cat(queries), plan, store, 0, scale=0.3)[: end - start]

    alone = torch.cat([rows(at, at + 1, 0) for at in range(490, tokens)])
    for start, size, company in [
        (490, 40, 0),
        (505, 9, 1),
        (511, 2, 2),
        (490, 22, 22),
        (520, 3, 9),
    ]:
        got = rows(start, start + size, company)
        assert torch.equal(got, alone[start - 490 : start - 490 + size]), (start, size, company)


def test_a_tile_is_measured():
    """Kernels that round rows by their number or place: the measurement must see through them."""

    def honest(query, keys, values):
        return query * 1.0

    def jumps_at(limit):
        def kernel(query, keys, values):
            tail = query.shape[2] % limit
            out = query.clone()
            if tail:
                out[:, :, -tail:] = torch.nextafter(out[:, :, -tail:], torch.tensor(9.0))
            return out

        return kernel

    def counts(query, keys, values):
        return query * (1.0 + 1e-6 * query.shape[2])

    dims = (1, 8, 8, torch.float32)
    assert measure_query_tile(honest, *dims) == TILES[0]
    assert measure_query_tile(jumps_at(8), *dims) == 8
    assert measure_query_tile(jumps_at(16), *dims) == 16
    assert measure_query_tile(counts, *dims) is None
