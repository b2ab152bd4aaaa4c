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
_VECTOR = 64
"""Widths that are a multiple of this have no end inside a row, on any processor torch knows."""


def by_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)` for tensors [rows, ...], in blocks of rows that are never cut."""
    if tensors[0].shape[0] <= (block := _block(tensors[0])):
        return function(*tensors)
    pieces = zip(*(tensor.split(block) for tensor in tensors), strict=True)
    return torch.cat([function(*piece) for piece in pieces])


def for_rows(function: Callable[..., object], *tensors: Tensor) -> None:
    """The same for a function that works in place."""
    if tensors[0].shape[0] <= (block := _block(tensors[0])):
        function(*tensors)
        return
    for piece in zip(*(tensor.split(block) for tensor in tensors), strict=True):
        function(*piece)


def _block(rows: Tensor) -> int:
    """Rows [rows, ...] that may be worked on in one call."""
    width = rows[:1].numel()
    return max(1, (_GRAIN - 1) // width) if width % _VECTOR == 0 else 1


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
