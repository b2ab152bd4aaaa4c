"""Attention of a batch of blocks whose sizes depend on no length, so that it can be captured.

The twin of `nn.attention.ragged_attention` for R requests with n rows each. That one reads keys in
place and plans every step on the host. This one copies R * S keys and values together, S being the
pages of the longest request, and masks what lies beyond each request's end: more memory traffic for
long contexts, and no decision left to the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.nn.attention import fold_heads, unfold_heads
from dspark.nn.kv_cache import KVStore
from dspark.nn.pages import PageTable


def padded_pages(tables: Sequence[PageTable], width: int) -> Tensor:
    """int64 pages [R, width] of requests, on the host.

    What lies behind a request's last page is its first one again: whatever is wrong with numbers
    that a mask hides is then wrong with its own alone.
    """
    rows = [table.pages + [table.pages[0]] * (width - len(table.pages)) for table in tables]
    return torch.tensor(rows)


def scratch_page(store: KVStore, page_size: int) -> int:
    """A page behind all others, for rows that stand for nobody."""
    assert len(store.keys[0]) > store.num_slots, "the store has no slots to read ahead"
    return store.num_slots // page_size


def page_slots(pages_RP: Tensor, page_size: int, store: KVStore) -> Tensor:
    """int64 slots [R, P * page_size] of every position that pages have room for."""
    offsets = torch.arange(page_size, device=pages_RP.device)
    slots_RS = (pages_RP[:, :, None] * page_size + offsets).flatten(1)
    # The scratch page may be cut off by the end of the memory.
    return slots_RS.clamp(max=len(store.keys[0]) - 1)


def padded_mask(ends_R: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [R, 1, 1, keys]: a request's rows see its positions before `ends_R`."""
    hidden_RS = torch.arange(keys, device=ends_R.device) >= ends_R[:, None]
    mask_RS = torch.zeros(hidden_RS.shape, dtype=dtype, device=ends_R.device)
    return mask_RS.masked_fill_(hidden_RS, float("-inf"))[:, None, None]


def padded_attention(
    query_NHD: Tensor,
    slots_RS: Tensor,
    mask_R11S: Tensor,
    store: KVStore,
    layer: int,
    *,
    scale: float,
) -> Tensor:
    """Attention of N = R * n rows, n neighbours a request, over the keys in its slots; returns
    [N, H, value_dim]."""
    heads_per_kv = query_NHD.shape[1] // store.shape.heads[layer]
    requests = len(slots_RS)
    keys, values = store.keys[layer][slots_RS], store.values[layer][slots_RS]
    result = F.scaled_dot_product_attention(
        fold_heads(query_NHD, requests, heads_per_kv).to(keys.dtype),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask_R11S,
        scale=scale,
    )
    return unfold_heads(result, len(query_NHD) // requests).to(query_NHD.dtype)
