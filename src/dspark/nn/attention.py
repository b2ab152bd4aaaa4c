"""Attention of one ragged step over paged keys and values.

`AttentionPlan` is built once a step and shared by all layers: which rows attend to which keys, the
masks, and the groups of requests that one kernel call can serve. `ragged_attention` is the
production form (torch's fused kernel); `plain_attention` spells the same thing out, is its slow
twin in tests, and serves the layers that the fused kernel cannot (score softcap, attention sinks).

Exactness (law 5): the fused CPU kernel walks keys in tiles of 512 and queries in tiles of at least
32 rows. With keys padded to whole tiles (masked) and query rows to a multiple of 4, a row's result
does not depend on how many rows stand beside it. `attention_is_exact` checks that on the running
machine.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.nn.kv_cache import KVStore
from dspark.nn.seams import RaggedBatch

KEY_TILE = 512
QUERY_TILE = 4
_PLAIN_ROWS = 64
"""Rows of one product in `plain_attention`: matrix products round differently from some size on."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive requests with equal query counts whose keys lie at a constant stride in the
    store."""

    requests: range
    rows: slice
    queries: int
    keys: int
    """Keys read per request, padding included."""
    stride: int | None
    """Slots from one request's keys to the next; None: a single request."""


@dataclass(slots=True)
class AttentionPlan:
    batch: RaggedBatch
    groups: list[_Group]
    _masks: dict[tuple[int, int, int | None, torch.dtype], Tensor | None] = field(
        default_factory=dict
    )

    @classmethod
    def build(cls, batch: RaggedBatch) -> "AttentionPlan":
        groups: list[_Group] = []
        count = len(batch.context_lengths)
        first = 0
        while first < count:
            last = _group_end(batch, first)
            longest = max(batch.context_lengths[first:last])
            keys = -(-longest // KEY_TILE) * KEY_TILE if batch.exact else longest
            start = batch.starts[first]
            groups.append(
                _Group(
                    requests=range(first, last),
                    rows=slice(start, batch.starts[last]),
                    queries=batch.starts[first + 1] - start,
                    keys=keys,
                    stride=_slot_stride(batch, first) if last - first > 1 else None,
                )
            )
            first = last
        return cls(batch, groups)

    def mask(
        self, index: int, heads_per_kv: int, window: int | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Additive mask [G, 1, heads_per_kv * queries, keys] of group `index`, or None.

        Rows are ordered (head in group, query). Built once a step for each kind of layer.
        """
        key = (index, heads_per_kv, window, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(self.groups[index], heads_per_kv, window, dtype)
        return self._masks[key]

    def _build_mask(
        self, group: _Group, heads_per_kv: int, window: int | None, dtype: torch.dtype
    ) -> Tensor | None:
        lengths = [self.batch.context_lengths[r] for r in group.requests]
        whole = all(length == group.keys for length in lengths)
        if group.queries == 1 and whole and (window is None or group.keys <= window):
            return None
        device = self.batch.positions_N.device
        positions = self.batch.positions_N[group.rows].view(len(lengths), 1, group.queries, 1)
        keys = torch.arange(group.keys, device=device)
        visible = keys <= positions
        if window is not None:
            visible &= keys > positions - window
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        mask.masked_fill_(~visible, float("-inf"))
        mask = mask.repeat(1, 1, heads_per_kv, 1)
        return _pad_queries(mask) if self.batch.exact else mask


def _group_end(batch: RaggedBatch, first: int) -> int:
    """One past the last request that can share a kernel call with `first`."""
    queries = batch.starts[first + 1] - batch.starts[first]
    keys = -(-batch.context_lengths[first] // KEY_TILE)
    stride = _slot_stride(batch, first)
    last = first + 1
    while last < len(batch.context_lengths):
        same_queries = batch.starts[last + 1] - batch.starts[last] == queries
        # Equal tiles also bound how far past its own pages a member of the group reads.
        same_keys = -(-batch.context_lengths[last] // KEY_TILE) == keys
        in_step = stride is not None and _slot_stride(batch, last - 1) == stride
        if not (same_queries and same_keys and in_step):
            break
        last += 1
    return last


def _slot_stride(batch: RaggedBatch, request: int) -> int | None:
    if request + 1 >= len(batch.tables):
        return None
    here, there = batch.tables[request].first_slot, batch.tables[request + 1].first_slot
    return None if here is None or there is None or there <= here else there - here


def ragged_attention(
    query_NHD: Tensor,
    plan: AttentionPlan,
    store: KVStore,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of every row over its request's keys; returns [N, H, value_dim]."""
    rows, heads, _ = query_NHD.shape
    heads_per_kv = heads // store.shape.heads[layer]
    out = query_NHD.new_empty(rows, heads, store.shape.value_dims[layer])
    for index, group in enumerate(plan.groups):
        keys, values = _read_group(store, layer, plan.batch, group)
        query = _fold(query_NHD[group.rows], len(group.requests), heads_per_kv)
        folded = query.shape[2]
        if plan.batch.exact:
            query = _pad_queries(query)
        mask = plan.mask(index, heads_per_kv, window, keys.dtype)
        result = F.scaled_dot_product_attention(
            query.to(keys.dtype), keys, values, attn_mask=mask, scale=scale
        )
        out[group.rows] = _unfold(result[:, :, :folded], group.queries)
    return out


def plain_attention(
    query_NHD: Tensor,
    plan: AttentionPlan,
    store: KVStore,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The same, spelled out request by request; also with a score softcap and attention sinks."""
    batch = plan.batch
    heads_per_kv = query_NHD.shape[1] // store.shape.heads[layer]
    pieces = []
    for r, length in enumerate(batch.context_lengths):
        padded = -(-length // KEY_TILE) * KEY_TILE if batch.exact else length
        keys, values = store.read(layer, batch.tables[r], length, padded)
        keys, values = keys.float().permute(1, 2, 0), values.float().transpose(0, 1)
        for first in range(batch.starts[r], batch.starts[r + 1], _PLAIN_ROWS):
            rows = slice(first, min(first + _PLAIN_ROWS, batch.starts[r + 1]))
            query = _fold(query_NHD[rows].float(), 1, heads_per_kv)[0]
            folded = query.shape[1]
            if batch.exact:
                query = _pad_queries(query)
            scores = torch.matmul(query, keys)[:, :folded] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            positions = batch.positions_N[rows, None].repeat(heads_per_kv, 1)
            index = torch.arange(padded, device=positions.device)
            hidden = index > positions
            if window is not None:
                hidden |= index <= positions - window
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks_H is not None:
                sinks = sinks_H.float().view(-1, heads_per_kv, 1)
                sinks = sinks.repeat_interleave(rows.stop - rows.start, dim=1)
                # In front: behind the keys they would stand elsewhere for every padding.
                scores = torch.cat([sinks, scores], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., -padded:]
            if batch.exact:
                weights = _pad_queries(weights)
            result = _weighted_sum(weights, values)[None, :, :folded]
            pieces.append(_unfold(result, rows.stop - rows.start))
    return torch.cat(pieces).to(query_NHD.dtype)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """weights [KV, rows, keys] @ values [KV, keys, dim], summed tile by tile of keys: a product over
    all of them would cut its sums elsewhere when there are more keys."""
    tiles = zip(weights.split(KEY_TILE, dim=-1), values.split(KEY_TILE, dim=1), strict=True)
    first, *others = (torch.matmul(w, v) for w, v in tiles)
    return sum(others, start=first)


def _read_group(
    store: KVStore, layer: int, batch: RaggedBatch, group: _Group
) -> tuple[Tensor, Tensor]:
    """Keys and values [G, KV, keys, dim] of a group; views wherever the pages allow it."""
    if group.stride is None:
        r = group.requests.start
        length = min(batch.context_lengths[r], group.keys)
        keys, values = store.read(layer, batch.tables[r], length, group.keys)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    first = batch.tables[group.requests.start].first_slot
    assert first is not None
    return tuple(  # type: ignore[return-value]
        memory.as_strided(
            (len(group.requests), memory.shape[1], group.keys, memory.shape[2]),
            (group.stride * memory.stride(0), memory.stride(1), memory.stride(0), 1),
            first * memory.stride(0),
        )
        for memory in (store.keys[layer], store.values[layer])
    )


def _fold(query: Tensor, requests: int, heads_per_kv: int) -> Tensor:
    """[G * n, H, D] -> [G, KV, heads_per_kv * n, D]: the heads that share keys become query
    rows."""
    rows, heads, dim = query.shape
    kv, n = heads // heads_per_kv, rows // requests
    folded = query.view(requests, n, kv, heads_per_kv, dim).permute(0, 2, 3, 1, 4)
    return folded.reshape(requests, kv, heads_per_kv * n, dim)


def _unfold(result: Tensor, queries: int) -> Tensor:
    """[G, KV, heads_per_kv * n, D] -> [G * n, H, D]."""
    requests, kv, folded, dim = result.shape
    result = result.view(requests, kv, folded // queries, queries, dim).permute(0, 3, 1, 2, 4)
    return result.reshape(requests * queries, -1, dim)


def _pad_queries(x: Tensor) -> Tensor:
    """Pads dim -2 to a multiple of QUERY_TILE; padded mask rows see everything, so nothing is
    NaN."""
    missing = -x.shape[-2] % QUERY_TILE
    return F.pad(x, (0, 0, 0, missing)) if missing else x
