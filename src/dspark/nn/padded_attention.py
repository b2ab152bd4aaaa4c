"""Attention of a batch of equal runs whose sizes depend on no length, so that it can be captured.

The twin of `nn.attention.ragged_attention` for R requests with n rows each. That one reads keys in
place and plans every step on the host. This one copies R * S keys and values together, S being the
pages of the longest request, and masks what lies beyond each request's end: more memory traffic for
long contexts, and no decision left to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.nn.attention import fold_heads, unfold_heads
from dspark.nn.graphs import bucket
from dspark.nn.kv_cache import KVStore
from dspark.nn.pages import PageTable

LEAST_KEYS = 256
"""Positions that the smallest graph has room for."""


def padded_size(tables: Sequence[PageTable]) -> tuple[int, int]:
    """Requests and pages of the graph for a step. A request has the pages for all that it may
    write, so they bound every position, and no length need be read from the device."""
    most = max(len(table.pages) for table in tables)
    return bucket(len(tables)), bucket(most, -(-LEAST_KEYS // tables[0].page_size))


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


def scratch_slot(store: KVStore) -> int:
    """The last slot of the memory, for rows that nobody asked for: the ragged forms read ahead, but
    never so far, so whatever is written there spoils no sum."""
    assert len(store.keys[0]) > store.num_slots, "the store has no slots to read ahead"
    return len(store.keys[0]) - 1


def page_slots(pages_RP: Tensor, page_size: int, store: KVStore) -> Tensor:
    """int64 slots [R, P * page_size] of every position that pages have room for."""
    offsets = torch.arange(page_size, device=pages_RP.device)
    slots_RS = (pages_RP[:, :, None] * page_size + offsets).flatten(1)
    # The scratch page may be cut off by the end of the memory.
    return slots_RS.clamp(max=len(store.keys[0]) - 1)


def padded_mask(
    positions_Rn: Tensor, keys: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Additive mask [R, 1, n, keys]: a row sees its request's positions up to its own, and of those
    the last `window` where there is one."""
    index = torch.arange(keys, device=positions_Rn.device)
    hidden_RnS = index > positions_Rn[..., None]
    if window is not None:
        hidden_RnS |= index <= positions_Rn[..., None] - window
    mask_RnS = torch.zeros(hidden_RnS.shape, dtype=dtype, device=positions_Rn.device)
    return mask_RnS.masked_fill_(hidden_RnS, float("-inf"))[:, None]


def padded_attention(
    query_NHD: Tensor,
    slots_RS: Tensor,
    mask_R1QS: Tensor,
    store: KVStore,
    layer: int,
    *,
    scale: float,
) -> Tensor:
    """Attention of N = R * n rows, n neighbours a request, over the keys in its slots; returns
    [N, H, value_dim]. The mask has a row for all of a request, or one for each that heads share
    keys, ordered as in `nn.attention.fold_heads`."""
    heads_per_kv = query_NHD.shape[1] // store.shape.heads[layer]
    requests = len(slots_RS)
    keys, values = store.keys[layer][slots_RS], store.values[layer][slots_RS]
    result = F.scaled_dot_product_attention(
        fold_heads(query_NHD, requests, heads_per_kv).to(keys.dtype),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask_R1QS,
        scale=scale,
    )
    return unfold_heads(result, len(query_NHD) // requests).to(query_NHD.dtype)


@dataclass(slots=True)
class PaddedPlan:
    """The static twin of an `AttentionPlan`: R requests with n rows each, whose keys an index
    gathers. Made inside of what is captured, so it reads nothing on the host."""

    positions_Rn: Tensor
    """int64 position of every row."""
    slots_N: Tensor
    """int64 slots that the R * n rows are written to."""
    slots_RS: Tensor
    """int64 slots that each request's keys are read from (`page_slots`)."""
    _masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def attend(
        self, query_NHD: Tensor, store: KVStore, layer: int, *, scale: float, window: int | None
    ) -> Tensor:
        """As `nn.attention.ragged_attention`."""
        heads_per_kv = query_NHD.shape[1] // store.shape.heads[layer]
        key = heads_per_kv, window, store.keys[layer].dtype
        if key not in self._masks:  # once for each kind of layer
            mask_R1nS = padded_mask(self.positions_Rn, self.slots_RS.shape[1], key[2], window)
            self._masks[key] = mask_R1nS.repeat(1, 1, heads_per_kv, 1)
        return padded_attention(
            query_NHD, self.slots_RS, self._masks[key], store, layer, scale=scale
        )
