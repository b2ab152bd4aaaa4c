"""Pages of key/value memory: who holds which, and which to hand out next.

Attention is cheapest where a request's pages are consecutive (its keys are a view of the store) and
where neighbours lie at a constant stride (one kernel call serves them all). So a table that is
expected to grow gets an *extent*: a window whose size is a power of two and whose start is a
multiple of it. It takes pages of it as it grows, and *claims* the rest. A claim is a wish: it
steers where others are put, and gives way when there is nothing else.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.core.errors import DSparkError

_NEVER = np.iinfo(np.int64).max

PageCopies = list[tuple[int, int]]
"""(from, to) pages whose content must be copied at once, before the pool is asked again."""


class OutOfPagesError(DSparkError):
    """The pool cannot give the pages asked for."""


class PageTable:
    """The pages of one request, in order of position."""

    __slots__ = ("_first_slot", "_pages", "_slots", "claim", "page_size")

    def __init__(self, pages: Sequence[int], page_size: int) -> None:
        self.page_size = page_size
        self.claim = range(0)
        """Pages it would like to grow into; the ones it holds may be among them."""
        self.pages = list(pages)

    @property
    def pages(self) -> list[int]:
        return self._pages

    @pages.setter
    def pages(self, pages: list[int]) -> None:
        self._pages = pages
        self._slots: Tensor | None = None
        self._first_slot: int | None = pages[0] * self.page_size if pages else 0
        if any(b != a + 1 for a, b in pairwise(pages)):
            self._first_slot = None

    @property
    def capacity(self) -> int:
        """Tokens the pages hold."""
        return len(self._pages) * self.page_size

    @property
    def first_slot(self) -> int | None:
        """The first slot if the pages are consecutive, else None."""
        return self._first_slot

    def slots(self, start: int, end: int) -> Tensor:
        """int64 slots of positions start .. end - 1."""
        assert 0 <= start <= end <= self.capacity, (start, end, self.capacity)
        if self._slots is None:
            pages = torch.tensor(self._pages, dtype=torch.int64)
            offsets = torch.arange(self.page_size, dtype=torch.int64)
            self._slots = (pages[:, None] * self.page_size + offsets).flatten()
        return self._slots[start:end]


class PagePool:
    """Who holds which page. `free + used == total` after anything (law 6).

    A page is used while a table holds it; several may (a shared prefix). A free page may still be
    *kept*: its content is worth something until the page is needed. Those that were used longest
    ago go first.

    requests: how many tables ordinarily share the pool; none claims more than its part.
    on_evict: told of every kept page that is handed out as an empty one.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        requests: int = 1,
        on_evict: Callable[[int], None] = lambda page: None,
    ) -> None:
        assert num_pages > 0 and page_size > 0, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._most_claimed = 1 << max(0, (num_pages // requests).bit_length() - 1)
        self._on_evict = on_evict
        self._holders = np.zeros(num_pages, dtype=np.int64)
        self._kept = np.zeros(num_pages, dtype=np.bool_)
        self._claimed = np.zeros(num_pages, dtype=np.bool_)
        self._used_at = np.zeros(num_pages, dtype=np.int64)  # 0: holds nothing worth keeping
        self._time = 0

    @property
    def free_pages(self) -> int:
        """Pages that no table holds, kept ones included."""
        return self.num_pages - int(np.count_nonzero(self._holders))

    @property
    def kept_pages(self) -> int:
        """Free pages whose content is kept."""
        return int(np.count_nonzero(self._kept & (self._holders == 0)))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> PageTable:
        """A table for `tokens` tokens that will not grow: consecutive pages where there are any."""
        count = self.pages_for(tokens)
        table = PageTable([], self.page_size)
        if count > self.free_pages:
            raise OutOfPagesError(
                f"{count} pages needed, {self.free_pages} of {self.num_pages} free"
            )
        start = self._window(count, aligned=False, claims=False)
        run = self._oldest(count) if start is None else range(start, start + count)
        self._hold(table, run)
        return table

    def grow(self, table: PageTable, tokens: int, most_tokens: int) -> PageCopies | None:
        """Lets `table` hold `tokens` tokens; None, and nothing has changed, for want of pages.

        most_tokens: what it may ever hold.

        In order of preference: the pages behind its last one; an extent for all of it, where what
        it has must be copied to; any pages.
        """
        total = self.pages_for(tokens)
        missing = total - len(table.pages)
        if missing <= 0:
            return []
        if missing > self.free_pages:
            return None
        if table.first_slot is not None and self._is_free_behind(table, missing, claims=False):
            self._hold(table, self._behind(table, missing))
            return []
        wanted = min(self.pages_for(most_tokens), max(self._most_claimed, total))
        for size in dict.fromkeys((_power_of_two(wanted), _power_of_two(total))):
            if (start := self._window(size, aligned=True, claims=False)) is not None:
                return self._move(table, total, range(start, start + size))
        run: Sequence[int] = self._oldest(missing)
        if not table.pages:
            if (start := self._window(total, aligned=False, claims=True)) is not None:
                run = range(start, start + total)
        elif self._is_free_behind(table, missing, claims=True):
            run = self._behind(table, missing)
        self._hold(table, run)
        return []

    def share(self, table: PageTable, pages: Sequence[int]) -> None:
        """Lets an empty table hold pages that others hold or that are kept."""
        assert not table.pages
        self._holders[list(pages)] += 1
        table.pages = list(pages)

    def keep(self, page: int) -> None:
        """Keeps the content of a held page until its place is needed."""
        assert self._holders[page] > 0, f"page {page} is nobody's"
        self._kept[page] = True

    def forget(self, page: int) -> None:
        """Its content is worth nothing to anybody any more."""
        if self._kept[page]:
            self._kept[page] = False
            self._on_evict(page)

    def is_shared(self, page: int) -> bool:
        """More than one table holds it."""
        return bool(self._holders[page] > 1)

    def release(self, table: PageTable) -> None:
        """Takes everything back. Nothing happens to a table that holds nothing."""
        for page in reversed(table.pages):  # the first pages of a prefix are wanted most
            assert self._holders[page] > 0, f"page {page} released twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._time += 1
                self._used_at[page] = self._time if self._kept[page] else 0
        table.pages = []
        self._claim(table, range(0))

    def check_integrity(self, tables: Sequence[PageTable]) -> None:
        """Every page is free, or held by just these tables."""
        held = np.zeros(self.num_pages, dtype=np.int64)
        for table in tables:
            assert len(table.pages) == len(set(table.pages)), "a table holds a page twice"
            held[table.pages] += 1
        assert np.array_equal(held, self._holders), "pages are lost, or held by more than is known"
        assert self.free_pages + int(np.count_nonzero(held)) == self.num_pages
        claimed = sum(len(table.claim) for table in tables)
        assert claimed == np.count_nonzero(self._claimed), "claims are lost or overlap"

    # -- choosing ---------------------------------------------------------------------------------

    def _window(self, size: int, *, aligned: bool, claims: bool) -> int | None:
        """Start of the window of free pages that was used longest ago, the lowest of several.

        claims: whether it may reach into claims.
        """
        if not 0 < size <= self.num_pages:
            return None
        busy = self._holders > 0 if claims else (self._holders > 0) | self._claimed
        used_at = np.where(busy, _NEVER, self._used_at)
        step = size if aligned else 1
        windows = np.lib.stride_tricks.sliding_window_view(used_at, size)[::step]
        latest: npt.NDArray[np.int64] = windows.max(axis=1)
        best = int(latest.argmin())
        return None if latest[best] == _NEVER else best * step

    def _oldest(self, count: int) -> list[int]:
        """Any free pages: unclaimed ones first, then those used longest ago."""
        free = np.flatnonzero(self._holders == 0)
        order = np.lexsort((free, self._used_at[free], self._claimed[free]))
        return sorted(free[order[:count]].tolist())

    def _behind(self, table: PageTable, count: int) -> range:
        start = table.pages[-1] + 1 if table.pages else self.num_pages
        return range(start, start + count)

    def _is_free_behind(self, table: PageTable, count: int, *, claims: bool) -> bool:
        run = self._behind(table, count)
        return run.stop <= self.num_pages and not any(
            self._holders[page] or (not claims and self._claimed[page] and page not in table.claim)
            for page in run
        )

    # -- changing hands ---------------------------------------------------------------------------

    def _hold(self, table: PageTable, pages: Sequence[int]) -> None:
        for page in pages:
            assert self._holders[page] == 0, f"page {page} is not free"
            if self._kept[page]:
                self._kept[page] = False
                self._on_evict(page)
            self._holders[page] = 1
        table.pages = [*table.pages, *pages]

    def _move(self, table: PageTable, total: int, extent: range) -> PageCopies:
        before = table.pages
        self.release(table)
        # Pages it alone held are free now, but outside the extent: nobody writes there before the
        # caller has copied them.
        self._hold(table, extent[:total])
        self._claim(table, extent)
        return list(zip(before, table.pages, strict=False))

    def _claim(self, table: PageTable, extent: range) -> None:
        self._claimed[table.claim.start : table.claim.stop] = False
        self._claimed[extent.start : extent.stop] = True
        table.claim = extent


def _power_of_two(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << (count - 1).bit_length()
