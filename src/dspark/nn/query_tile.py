"""How many query rows an attention product needs for a row to be exact (law 5), measured.

Matrix kernels take what is left of the rows at the end in another order than whole tiles: with head
dimension 64 four rows at a time are exact on some processors, with 128 it takes eight. So query
rows are padded to a multiple that this machine shows to be exact.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [G, KV, rows, key_dim], keys and values [G, KV, keys, dim] -> [G, KV, rows, value_dim]."""

TILES = (4, 8, 16, 32)
_COUNTS = (*range(4, 97, 4), 128, 160, 188, 192, 196, 256, 300, 768, 772)
_KEYS = (256, 512, 768)


def measure_query_tile(
    kernel: AttentionKernel, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> int | None:
    """The least of TILES whose multiples give bit-equal rows; None if none does.

    Probed with one request and with two, because a product that stands alone may be shared among
    threads. Measured once a process for each number of threads.
    """
    return _measured(kernel, min(kv_heads, 2), key_dim, value_dim, dtype, torch.get_num_threads())


@cache
def _measured(
    kernel: AttentionKernel,
    kv_heads: int,  # at most 2: heads are separate products, and two are as good as many
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    threads: int,
) -> int | None:
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, dim: int) -> Tensor:
        memory = torch.randn(2, rows, kv_heads, dim, generator=generator)
        return memory.to(dtype).transpose(1, 2)

    # Values of very different sizes: any other order of a sum shows.
    query = draw(max(_COUNTS), key_dim)
    good = set(_COUNTS)
    for length in _KEYS:
        keys = draw(length, key_dim)
        sizes = 2.0 ** torch.randint(-8, 8, (length, 1), generator=generator)
        values = draw(length, value_dim) * sizes.to(dtype)
        tiles = [kernel(rows.contiguous(), keys, values) for rows in query.split(TILES[-1], dim=2)]
        reference = torch.cat(tiles, dim=2)
        for count in list(good):
            rows = query[:, :, :count].contiguous()
            results = (kernel(rows[:g], keys[:g], values[:g]) for g in (1, 2))
            same = (torch.equal(own, reference[: len(own), :, :count]) for own in results)
            if not all(same):
                good.discard(count)
    return next((t for t in TILES if good.issuperset(c for c in _COUNTS if c % t == 0)), None)
