"""Law 6: pages that come and go, grow, move, are shared, kept and evicted."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark.nn.pages import OutOfPagesError, PagePool, PageTable

PAGES, SIZE = 13, 3


class Pages(RuleBasedStateMachine):
    """Any interleaving; each page's content is the name of its writer and position."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES, SIZE, requests=3, on_evict=self.evicted)
        self.tables = []
        self.fixed = []
        self.memory = [None] * PAGES
        self.expected = {}  # table -> contents
        self.kept = {}  # page -> content
        self.names = 0

    def evicted(self, page):
        del self.kept[page]

    def write(self, table, first):
        for index in range(first, len(table.pages)):
            self.names += 1
            self.memory[table.pages[index]] = self.names
            self.expected[table].append(self.names)

    @rule(tokens=st.integers(1, 45))
    def allocate(self, tokens):
        before = self.pool.free_pages
        if self.pool.pages_for(tokens) > before:
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(tokens)
            assert self.pool.free_pages == before
            return
        table = self.pool.allocate(tokens)
        assert len(table.pages) == self.pool.pages_for(tokens) and not table.claim
        self.expected[table] = []
        self.write(table, 0)
        self.tables.append(table)
        self.fixed.append(table)

    @rule()
    def begin(self):
        table = PageTable([], SIZE)
        self.tables.append(table)
        self.expected[table] = []

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(1, 14), later=st.integers(0, 40))
    def grow(self, data, more, later):
        table = data.draw(st.sampled_from(self.tables))
        held, free = list(table.pages), self.pool.free_pages
        tokens = table.capacity + more
        missing = self.pool.pages_for(tokens) - len(held)
        copies = self.pool.grow(table, tokens, tokens + later)
        if missing > free:
            assert copies is None and table.pages == held and self.pool.free_pages == free
            return
        assert len(table.pages) == self.pool.pages_for(tokens)
        assert copies == [] or [source for source, _ in copies] == held
        for source, to in copies:
            self.memory[to] = self.memory[source]
        self.write(table, len(held))

    @precondition(lambda self: any(table.pages for table in self.tables))
    @rule(data=st.data())
    def keep(self, data):
        table = data.draw(st.sampled_from([table for table in self.tables if table.pages]))
        page = data.draw(st.sampled_from(table.pages))
        self.pool.keep(page)
        self.kept[page] = self.memory[page]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.kept)), min_size=1, unique=True))
        table = PageTable([], SIZE)
        self.pool.share(table, pages)
        self.tables.append(table)
        self.expected[table] = [self.kept[page] for page in pages]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        del self.expected[table]
        assert table.pages == [] and table.claim == range(0)
        self.pool.release(table)  # it holds nothing any more

    @invariant()
    def free_and_used_are_all(self):
        self.pool.check_integrity(self.tables)
        used = {page for table in self.tables for page in table.pages}
        assert self.pool.free_pages + len(used) == PAGES
        assert self.pool.kept_pages == len(set(self.kept) - used)

    @invariant()
    def nobody_writes_over_another(self):
        for table in self.tables:
            assert [self.memory[page] for page in table.pages] == self.expected[table]
        for page, content in self.kept.items():
            assert self.memory[page] == content

    @invariant()
    def slots_are_those_of_the_pages(self):
        for table in self.tables:
            slots = [page * SIZE + offset for page in table.pages for offset in range(SIZE)]
            assert table.slots(0, table.capacity).tolist() == slots
            consecutive = slots == list(range(slots[0], slots[0] + len(slots))) if slots else True
            assert table.first_slot == ((slots[0] if slots else 0) if consecutive else None)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, deadline=None)


def grown(pool, tokens, most):
    table = PageTable([], pool.page_size)
    assert pool.grow(table, tokens, most) == []
    return table


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


def test_integrity_sees_lost_and_shared_pages():
    pool = PagePool(4, 2)
    table = pool.allocate(4)
    with pytest.raises(AssertionError):
        pool.check_integrity([])
    with pytest.raises(AssertionError):
        pool.check_integrity([table, PageTable([table.pages[0]], 2)])


def test_requests_of_one_kind_lie_at_a_constant_stride_and_grow_in_place():
    """What lets one attention call serve a whole batch, though prompts differ in length."""
    pool = PagePool(64, 16, requests=8)
    tables = [grown(pool, tokens, 120) for tokens in (5, 40, 17, 64, 33, 9, 100, 1)]
    assert [table.pages[0] for table in tables] == list(range(0, 64, 8))
    for tokens in range(101, 121):
        for table in tables:
            assert pool.grow(table, tokens, 120) == [] and table.first_slot is not None
    assert pool.free_pages == 0


def test_claims_give_way_where_there_is_nothing_else():
    pool = PagePool(8, 1, requests=2)
    first, second = grown(pool, 1, 4), grown(pool, 1, 4)
    assert (first.pages, second.pages) == ([0], [4])
    third = grown(pool, 2, 4)
    assert third.first_slot is not None and pool.free_pages == 4
    # Whose claim was taken goes where there is a whole extent again, once there is one.
    pool.release(second)
    before = first.pages
    copies = pool.grow(first, 4, 4)
    assert first.first_slot is not None and (not copies or [s for s, _ in copies] == before)
    pool.check_integrity([first, third])


def test_a_table_that_is_stopped_moves_to_an_extent_twice_as_large():
    pool = PagePool(16, 1, requests=8)
    first, second = grown(pool, 2, 9), grown(pool, 2, 9)
    assert (first.pages, second.pages) == ([0, 1], [2, 3])
    assert pool.grow(first, 3, 9) == [(0, 4), (1, 5)]
    assert first.pages == [4, 5, 6] and first.claim == range(4, 8)
    assert pool.grow(first, 4, 9) == []
    assert pool.grow(second, 3, 9) == [(2, 8), (3, 9)]  # 0 to 3 are free, but second's own
    pool.check_integrity([first, second])


def test_the_pages_used_longest_ago_are_evicted_first():
    evicted = []
    pool = PagePool(8, 1, requests=2, on_evict=evicted.append)
    tables = [pool.allocate(4), pool.allocate(4)]
    for table in tables:
        for page in table.pages:
            pool.keep(page)
    pool.release(tables[1])
    pool.release(tables[0])
    assert pool.free_pages == pool.kept_pages == 8
    again = PageTable([], 1)
    pool.share(again, [4, 5])
    pool.release(again)  # now 6 and 7 are the oldest, then all of the first table
    assert grown(pool, 2, 2).pages == [6, 7]
    assert grown(pool, 3, 3).pages == [0, 1, 2]
    assert grown(pool, 1, 1).pages == [5], "the beginning of a prefix outlives its end"
    assert evicted == [6, 7, 0, 1, 2, 5] and pool.kept_pages == 2


def test_slots_of_a_table_that_moved():
    table = PageTable([3, 4], 2)
    assert table.slots(0, 4).tolist() == [6, 7, 8, 9]
    table.pages = [0, 2]
    assert table.slots(0, 4).tolist() == [0, 1, 4, 5] and table.first_slot is None
    assert torch.equal(table.slots(1, 3), torch.tensor([1, 4]))
