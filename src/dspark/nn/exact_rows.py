"""Row counts at which a matrix kernel gives bit-equal rows (law 5), measured, and how to keep to
them.

A kernel may round a row differently when the number of rows changes: oneDNN on AMX has one way to
sum up to 32 rows and another beyond. Each way is a *class* of counts that agree. Decoded rows keep
to the class of small counts, prompts to that of large ones: what is cut into calls of 32 rows reads
all weights for each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Kernel = Callable[[Tensor], Tensor]
"""[rows, in] -> [rows, out] without bias, in float32 or in the kernel's own precision."""

_REFERENCE = 8
"""Near a verification batch of one request, whose cost matters most."""
_COUNTS = (*range(1, 65), *range(72, 129, 8), 160, 192, 256)
_PROMPT_REFERENCE = 64
_PROMPT_COUNTS = (*range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32))
_SHIFT = 5
"""Rows are tried at two places of a call."""


@dataclass(frozen=True, slots=True)
class ExactRows:
    """Row counts of one class, ascending."""

    counts: tuple[int, ...]

    @property
    def serves_few(self) -> bool:
        """Whether this is the class of small counts."""
        return _REFERENCE in self.counts

    def cut(self, rows: int) -> list[tuple[int, int]]:
        """Calls for so many rows: how many of them, and the count to pad them to.

        A last call is padded by an eighth of its rows, or by eight, rather than cut in two.
        """
        calls = []
        while rows:
            above = next((count for count in self.counts if count >= rows), None)
            below = max((count for count in self.counts if count <= rows), default=None)
            if above is not None and (below is None or above - rows < max(8, rows / 8)):
                calls.append((rows, above))
                break
            assert below is not None, "there are no counts at all"
            calls.append((below, below))
            rows -= below
        return calls


def run_exact(kernel: Kernel, rows: Tensor, exact: ExactRows) -> Tensor:
    """Runs `kernel` in calls of exact row counts."""
    if rows.shape[0] in exact.counts:
        return kernel(rows)
    pieces, start = [], 0
    for length, padded in exact.cut(rows.shape[0]):
        piece = rows[start : start + length]
        if padded > length:
            piece = F.pad(piece, (0, 0, 0, padded - length))
        pieces.append(kernel(piece)[:length])
        start += length
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def measure_rows(kernel: Kernel, inputs: Tensor) -> ExactRows | None:
    """The class of small counts; None if even the reference repeats badly."""
    return _class(_Tried(kernel, inputs), _REFERENCE, _COUNTS)


def measure_prompt_rows(kernel: Kernel, inputs: Tensor) -> ExactRows | None:
    """The class that serves prompts best: the larger of those of 64 rows and of 8."""
    tried = _Tried(kernel, inputs)
    found = [_class(tried, count, _PROMPT_COUNTS) for count in (_PROMPT_REFERENCE, _REFERENCE)]
    return max(filter(None, found), key=lambda exact: len(exact.counts), default=None)


def probe(in_features: int, out_features: int, *, prompts: bool) -> tuple[Tensor, Tensor]:
    """A weight [out, in] and inputs [rows, in] that make the order of a sum visible.

    Inputs hold pairs of large values that cancel through equal weights, placed far apart, so that
    any other order leaves a remainder, even after the output is rounded to bfloat16.
    """
    rows = max(_PROMPT_COUNTS if prompts else _COUNTS) + _SHIFT
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    weight = torch.randn(out_features, in_features, generator=generator) * 0.04
    weight[:, half : 2 * half] = weight[:, :half]
    inputs = torch.randn(rows, in_features, generator=generator)
    large = torch.randn(rows, half, generator=generator) * 2**12
    inputs[:, :half] += large
    inputs[:, half : 2 * half] -= large
    order = torch.randperm(in_features, generator=generator)
    return weight[:, order].bfloat16().float(), inputs[:, order].bfloat16().float()


class _Tried:
    """A kernel's results for the first rows of the probe, and for those from _SHIFT on."""

    def __init__(self, kernel: Kernel, inputs: Tensor) -> None:
        self.kernel, self.inputs = kernel, inputs
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, count: int) -> tuple[Tensor, Tensor]:
        if count not in self._known:
            first, shifted = self.inputs[:count], self.inputs[_SHIFT : _SHIFT + count]
            self._known[count] = self.kernel(first.contiguous()), self.kernel(shifted.contiguous())
        return self._known[count]

    def in_tiles(self, count: int) -> Tensor:
        """All rows, `count` a call; the last call is filled up with the first rows."""
        missing = -len(self.inputs) % count
        rows = torch.cat([self.inputs, self.inputs[:missing]])
        return torch.cat([self.kernel(tile) for tile in rows.split(count)])[: len(self.inputs)]


def _class(tried: _Tried, reference: int, counts: tuple[int, ...]) -> ExactRows | None:
    expected = tried.in_tiles(reference)
    found = tuple(
        count
        for count in counts
        if torch.equal((results := tried(count))[0], expected[:count])
        and torch.equal(results[1], expected[_SHIFT : _SHIFT + count])
    )
    return ExactRows(found) if found else None
