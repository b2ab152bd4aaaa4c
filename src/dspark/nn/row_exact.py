"""Functions of rows whose results do not depend on the rows beside them (law 5).

torch works through a tensor in vectors, does what is left at the end of each thread's share one by
one, and the two ways round some functions (silu, gelu, complex products) differently. Where a row
meets such an end would depend on how many rows there are and on the number of threads.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dspark.nn.linear import RowMode

_GRAIN = 16384
"""torch shares an elementwise call among threads only above this many elements (gelu; twice as
many for others)."""
_SHARED = 32768
"""From so many elements a thread on, every thread gets an equal share of the call, whatever the
function: where the rows divide by the threads, no share ends inside a row."""
_VECTOR = 64
"""Widths that are a multiple of this have no end inside a row, on any processor torch knows."""


def by_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)` for tensors [rows, ...], in pieces of rows that are never cut."""
    sizes = _pieces(tensors[0])
    if len(sizes) == 1:
        return function(*tensors)
    pieces = zip(*(tensor.split(sizes) for tensor in tensors), strict=True)
    return torch.cat([function(*piece) for piece in pieces])


def for_rows(function: Callable[..., object], *tensors: Tensor) -> None:
    """The same for a function that works in place."""
    for piece in zip(*(tensor.split(_pieces(tensors[0])) for tensor in tensors), strict=True):
        function(*piece)


def _pieces(tensor: Tensor) -> list[int]:
    """Rows of [rows, ...] that may be worked on in one call each."""
    rows, width, threads = tensor.shape[0], tensor[:1].numel(), torch.get_num_threads()
    if rows <= 1:
        return [rows]
    if width % _VECTOR or width >= _GRAIN:  # a row alone may be shared among threads
        return [1] * rows
    if threads == 1:
        return [rows]
    even = rows // threads * threads
    if even * width < threads * _SHARED:
        even = 0
    block = (_GRAIN - 1) // width
    whole, rest = divmod(rows - even, block)
    return [size for size in (even, *[block] * whole, rest) if size]


class RowActivation(nn.Module):
    """An activation, by rows in exact mode."""

    def __init__(self, activation: nn.Module, mode: RowMode) -> None:
        super().__init__()
        self.activation = activation
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        if not self.mode.exact:
            return self.activation(x)
        return by_rows(self.activation, x.reshape(-1, x.shape[-1])).view(x.shape)


class RowByRow(nn.Module):
    """A block [1, N, D] -> [1, N, D], one row at a time in exact mode.

    For experts: how many rows meet in one of them depends on the whole batch.
    """

    def __init__(self, block: nn.Module, mode: RowMode) -> None:
        super().__init__()
        self.block = block
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, None]:
        if not self.mode.exact:
            return self.block(x)
        rows = [self.block(row) for row in x.split(1, dim=1)]
        if isinstance(rows[0], tuple):  # (hidden states, router scores); nobody reads the scores
            return torch.cat([row[0] for row in rows], dim=1), None
        return torch.cat(rows, dim=1)
