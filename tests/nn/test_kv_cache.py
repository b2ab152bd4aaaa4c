"""Law 6, and what a store gives back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark.nn.kv_cache import KVShape, KVStore, OutOfPagesError, PagePool, PageTable


class Pages(RuleBasedStateMachine):
    """Any interleaving of requests that come and go."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(num_pages=11, page_size=3)
        self.tables = []

    @rule(tokens=st.integers(1, 40))
    def allocate(self, tokens):
        count, before = self.pool.pages_for(tokens), self.pool.free_pages
        if count > before:
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(tokens)
            assert self.pool.free_pages == before
            return
        table = self.pool.allocate(tokens)
        assert len(table.pages) == count and table.capacity >= tokens
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables.pop(index)
        self.pool.release(table)
        assert table.pages == []

    @invariant()
    def free_and_used_are_all(self):
        self.pool.check_integrity(self.tables)
        held = [page for table in self.tables for page in table.pages]
        assert len(set(held)) == len(held)
        assert self.pool.free_pages + len(held) == self.pool.num_pages

    @invariant()
    def a_run_is_taken_where_there_is_one(self):
        for table in self.tables:
            slots = table.slots(0, table.capacity)
            assert slots.unique().numel() == table.capacity
            if table.first_slot is not None:
                assert torch.equal(slots, table.first_slot + torch.arange(table.capacity))


TestPages = Pages.TestCase


def test_consecutive_pages_are_preferred():
    pool = PagePool(8, 2)
    tables = [pool.allocate(2) for _ in range(8)]
    for page in (0, 2, 4, 5, 6):
        pool.release(tables[page])
    assert pool.allocate(6).pages == [4, 5, 6]
    scattered = pool.allocate(4)
    assert scattered.pages == [0, 2] and scattered.first_slot is None


def test_a_page_cannot_be_released_twice():
    pool = PagePool(4, 2)
    table = pool.allocate(4)
    copy = PageTable(list(table.pages), 2)
    pool.release(table)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(copy)
    pool.release(table)  # it holds nothing any more
    pool.check_integrity([])


def test_integrity_sees_lost_and_shared_pages():
    pool = PagePool(4, 2)
    table = pool.allocate(4)
    with pytest.raises(AssertionError):
        pool.check_integrity([])
    with pytest.raises(AssertionError):
        pool.check_integrity([table, PageTable([table.pages[0]], 2)])


@given(pages=st.permutations(range(6)).map(lambda order: order[:4]), length=st.integers(1, 12))
def test_a_store_gives_back_what_was_written(pages, length):
    store = KVStore(KVShape((2,), (3,), (5,)), 18, read_ahead=16)
    table = PageTable(list(pages), 3)
    keys, values = torch.randn(length, 2, 3), torch.randn(length, 2, 5)
    store.write(0, table.slots(0, length), keys, values)
    for padded in (length, length + 4):
        got_keys, got_values = store.read(0, table, length, padded)
        assert got_keys.shape == (padded, 2, 3) and got_values.shape == (padded, 2, 5)
        assert torch.equal(got_keys[:length], keys) and torch.equal(got_values[:length], values)
        assert got_keys.isfinite().all() and got_values.isfinite().all()


def test_bytes_per_token():
    shape = KVShape((2, 4), (8, 8), (8, 16))
    assert shape.bytes_per_token(torch.float32) == 4 * (2 * 16 + 4 * 24)
    assert KVShape.uniform(3, 2, 8).bytes_per_token(torch.bfloat16) == 2 * 3 * 2 * 16
