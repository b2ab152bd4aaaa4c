"""Paged key/value memory for target and drafter.

A `KVStore` is the memory of one model, indexed by the slots of pages (nn.pages). Target and drafter
have a store each and share the page tables, so one budget and one bookkeeping serve both.

Slots of a page are consecutive. Where the pages of a table are consecutive too, a request's keys
are a view of the store; otherwise they are gathered.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.nn.pages import PageCopies, PageTable


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
        self.device = torch.device(device)
        self.num_slots = num_slots
        rows = num_slots + read_ahead
        self.keys = [
            _zeros((rows, heads, dim), dtype, device)
            for heads, dim in zip(shape.heads, shape.key_dims, strict=True)
        ]
        self.values = [
            _zeros((rows, heads, dim), dtype, device)
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
        slots = table.slots(0, length).to(self.keys[layer].device)
        if padded > length:
            slots = torch.cat([slots, slots[-1:].expand(padded - length)])
        return self.keys[layer][slots], self.values[layer][slots]

    def copy(self, copies: PageCopies, page_size: int) -> None:
        """Copies whole pages; no page is both read and written."""
        if not copies:
            return
        device = self.device  # a drafter may keep no layer at all
        offsets = torch.arange(page_size, device=device)
        source, to = (
            (torch.tensor(pages, device=device)[:, None] * page_size + offsets).flatten()
            for pages in zip(*copies, strict=True)
        )
        for memory in (*self.keys, *self.values):
            memory[to] = memory[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros that take no memory on a CPU until they are written: a budget is not its use."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    bits = torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}"))
    return bits.view(dtype)
