"""Paged key/value memory for target and drafter.

A `PagePool` hands out pages; a `PageTable` says which pages a request holds; a `KVStore` is the
memory of one model, indexed by the slots of those pages. Target and drafter have a store each and
share the tables, so one budget and one bookkeeping serve both.

Slots of a page are consecutive. The pool prefers consecutive pages, and then a request's keys are a
view of the store; otherwise they are gathered.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.core.errors import DSparkError


class OutOfPagesError(DSparkError):
    """The pool cannot give the pages asked for; the request must wait or be preempted."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Per layer: number of KV heads and the width of a key and of a value."""

    heads: tuple[int, ...]
    key_dims: tuple[int, ...]
    value_dims: tuple[int, ...]

    @classmethod
    def uniform(cls, layers: int, heads: int, dim: int) -> "KVShape":
        return cls((heads,) * layers, (dim,) * layers, (dim,) * layers)

    @property
    def num_layers(self) -> int:
        return len(self.heads)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        widths = (
            h * (k + v) for h, k, v in zip(self.heads, self.key_dims, self.value_dims, strict=True)
        )
        return sum(widths) * dtype.itemsize


class PageTable:
    """The pages of one request, in order of position."""

    __slots__ = ("_slots", "page_size", "pages")

    def __init__(self, pages: list[int], page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._slots: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens the pages hold."""
        return len(self.pages) * self.page_size

    @property
    def first_slot(self) -> int | None:
        """The first slot if the pages are consecutive, else None."""
        if all(b == a + 1 for a, b in zip(self.pages, self.pages[1:], strict=False)):
            return self.pages[0] * self.page_size if self.pages else 0
        return None

    def slots(self, start: int, end: int) -> Tensor:
        """int64 slots of positions start .. end - 1."""
        assert 0 <= start <= end <= self.capacity, (start, end, self.capacity)
        if self._slots is None or len(self._slots) != self.capacity:
            pages = torch.tensor(self.pages, dtype=torch.int64)
            offsets = torch.arange(self.page_size, dtype=torch.int64)
            self._slots = (pages[:, None] * self.page_size + offsets).flatten()
        return self._slots[start:end]


class PagePool:
    """Who owns which page. `free + used == total` after anything (law 6)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 0 and page_size > 0, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = [True] * num_pages

    @property
    def free_pages(self) -> int:
        return sum(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> PageTable:
        """Pages for `tokens` tokens: the first consecutive run that fits, else whatever is free."""
        count = self.pages_for(tokens)
        if count > self.free_pages:
            raise OutOfPagesError(
                f"{count} pages needed, {self.free_pages} of {self.num_pages} free"
            )
        pages = (
            self._first_run(count) or [page for page, free in enumerate(self._free) if free][:count]
        )
        for page in pages:
            self._free[page] = False
        return PageTable(pages, self.page_size)

    def release(self, table: PageTable) -> None:
        for page in table.pages:
            assert not self._free[page], f"page {page} released twice"
            self._free[page] = True
        table.pages = []

    def check_integrity(self, tables: list[PageTable]) -> None:
        """Every page is free or held by exactly one table."""
        held = [page for table in tables for page in table.pages]
        assert len(held) == len(set(held)), "a page is held twice"
        assert len(held) + self.free_pages == self.num_pages, (
            len(held),
            self.free_pages,
            self.num_pages,
        )
        assert not any(self._free[page] for page in held), "a held page is marked free"

    def _first_run(self, count: int) -> list[int] | None:
        run = 0
        for page, free in enumerate(self._free):
            run = run + 1 if free else 0
            if run == count:
                return list(range(page - count + 1, page + 1))
        return None


class KVStore:
    """Keys and values of every layer of one model, addressed by slot."""

    def __init__(
        self,
        shape: KVShape,
        num_slots: int,
        *,
        read_ahead: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`read_ahead` slots lie beyond the last page, because attention reads whole tiles of keys
        (masked; zeros or another request's finite values)."""
        self.shape = shape
        self.num_slots = num_slots
        rows = num_slots + read_ahead
        self.keys = [
            torch.zeros(rows, heads, dim, dtype=dtype, device=device)
            for heads, dim in zip(shape.heads, shape.key_dims, strict=True)
        ]
        self.values = [
            torch.zeros(rows, heads, dim, dtype=dtype, device=device)
            for heads, dim in zip(shape.heads, shape.value_dims, strict=True)
        ]

    def write(self, layer: int, slots_N: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys [N, heads, key_dim] and values [N, heads, value_dim] at the given slots."""
        memory = self.keys[layer]
        memory.index_copy_(0, slots_N, keys.to(memory.dtype))
        self.values[layer].index_copy_(0, slots_N, values.to(memory.dtype))

    def read(self, layer: int, table: PageTable, length: int, padded: int) -> tuple[Tensor, Tensor]:
        """Keys and values [padded, heads, dim] of positions 0 .. length - 1; rows from `length` on
        are finite and must be masked. A view where the pages are consecutive, else a copy."""
        assert length <= padded
        first = table.first_slot
        if first is not None:
            return self.keys[layer][first : first + padded], self.values[layer][
                first : first + padded
            ]
        slots = table.slots(0, length)
        if padded > length:
            slots = torch.cat([slots, slots[-1:].expand(padded - length)])
        return self.keys[layer][slots], self.values[layer][slots]
