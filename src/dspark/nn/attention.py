"""Attention of one ragged step over paged keys and values, as an `AttentionPlan` has it.

`ragged_attention` is the production form (torch's fused kernel); `plain_attention` spells the same
thing out, is its slow twin in tests, and serves the layers that the fused kernel cannot (score
softcap, attention sinks, values narrower than keys).

Exactness (law 5): in exact mode query rows are padded to a multiple that `measure_query_tile` found
on the running machine. With the plan's tiles of keys, a row's result does then not depend on what
stands beside it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.nn.attention_plan import AttentionPlan, Group, pad_queries
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.query_tile import TILES, AttentionKernel, measure_query_tile
from dspark.nn.seams import RaggedBatch

KEY_TILE = 512
"""Keys that `plain_attention` multiplies at a time; the most that a read goes beyond a text."""
_PLAIN_ROWS = 64
"""Rows of one product in `plain_attention`: matrix products round differently from some size on."""


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
    heads_per_kv = query_NHD.shape[1] // store.shape.heads[layer]
    tile = _tile(_fused, store, layer) if plan.batch.exact else 1
    pieces = []
    for index, group in enumerate(plan.groups):
        keys, values = _read_group(store, layer, plan.batch, group)
        query = fold_heads(query_NHD[group.rows], len(group.requests), heads_per_kv)
        folded = query.shape[2]
        result = F.scaled_dot_product_attention(
            pad_queries(query, tile).to(keys.dtype),
            keys,
            values,
            attn_mask=plan.mask(index, heads_per_kv, window, keys.dtype, tile),
            scale=scale,
        )
        pieces.append(unfold_heads(result[:, :, :folded], group.queries))
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out.to(query_NHD.dtype)


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
    tile = _tile(_plain, store, layer) if batch.exact else 1
    pieces = []
    for r, length in enumerate(batch.context_lengths):
        padded = -(-length // KEY_TILE) * KEY_TILE if batch.exact else length
        keys, values = store.read(layer, batch.tables[r], length, padded)
        keys, values = keys.float().permute(1, 2, 0), values.float().transpose(0, 1)
        for first in range(batch.starts[r], batch.starts[r + 1], _PLAIN_ROWS):
            rows = slice(first, min(first + _PLAIN_ROWS, batch.starts[r + 1]))
            query = fold_heads(query_NHD[rows].float(), 1, heads_per_kv)[0]
            folded = query.shape[1]
            scores = torch.matmul(pad_queries(query, tile), keys)[:, :folded] * scale
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
            result = _weighted_sum(pad_queries(weights, tile), values)[None, :, :folded]
            pieces.append(unfold_heads(result, rows.stop - rows.start))
    return torch.cat(pieces).to(query_NHD.dtype)


def fused_serves(shape: KVShape, layer: int) -> bool:
    """Whether torch runs its fused kernel for this layer. Where a value is narrower than a key
    (latent attention) it multiplies whole matrices instead, and those cut their sums elsewhere when
    there are more keys."""
    return shape.key_dims[layer] == shape.value_dims[layer]


def attention_is_exact(shape: KVShape, dtype: torch.dtype, *, fused: bool) -> bool:
    """Whether exact mode holds on this machine, for the layers of one model; `fused` or plain."""
    layers = {
        (_fused if fused and fused_serves(shape, layer) else _plain, *dims)
        for layer, dims in enumerate(
            zip(shape.heads, shape.key_dims, shape.value_dims, strict=True)
        )
    }
    return all(measure_query_tile(*layer, dtype) is not None for layer in layers)


def _tile(kernel: AttentionKernel, store: KVStore, layer: int) -> int:
    shape = store.shape
    dims = shape.heads[layer], shape.key_dims[layer], shape.value_dims[layer]
    return measure_query_tile(kernel, *dims, store.keys[layer].dtype) or TILES[-1]


def _fused(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    mask = query.new_zeros(1, 1, query.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def _plain(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    weights = torch.matmul(query.float(), keys.float().transpose(2, 3)).softmax(-1)
    return _weighted_sum(weights, values.float())


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """weights [.., rows, keys] @ values [.., keys, dim], summed tile by tile of keys: one product
    over all of them would cut its sums elsewhere when there are more keys."""
    tiles = zip(weights.split(KEY_TILE, dim=-1), values.split(KEY_TILE, dim=-2), strict=True)
    first, *others = (torch.matmul(w, v) for w, v in tiles)
    return sum(others, start=first)


def _read_group(
    store: KVStore, layer: int, batch: RaggedBatch, group: Group
) -> tuple[Tensor, Tensor]:
    """Keys and values [G, KV, keys, dim] of a group; views wherever the pages allow it."""
    if group.first_slot is None:
        r = group.requests.start
        length = min(batch.context_lengths[r], group.keys)
        keys, values = store.read(layer, batch.tables[r], length, group.keys)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    return (
        _strided(store.keys[layer], group, group.first_slot),
        _strided(store.values[layer], group, group.first_slot),
    )


def _strided(memory: Tensor, group: Group, first_slot: int) -> Tensor:
    """A group's part of one layer's keys or values, as a view."""
    slot, head, _ = memory.stride()
    return memory.as_strided(
        (len(group.requests), memory.shape[1], group.keys, memory.shape[2]),
        (group.stride * slot, head, slot, 1),
        first_slot * slot,
    )


def fold_heads(query: Tensor, requests: int, heads_per_kv: int) -> Tensor:
    """[G * n, H, D] -> [G, KV, heads_per_kv * n, D]: the heads that share keys become query
    rows."""
    rows, heads, dim = query.shape
    kv, n = heads // heads_per_kv, rows // requests
    folded = query.view(requests, n, kv, heads_per_kv, dim).permute(0, 2, 3, 1, 4)
    return folded.reshape(requests, kv, heads_per_kv * n, dim)


def unfold_heads(result: Tensor, queries: int) -> Tensor:
    """[G, KV, heads_per_kv * n, D] -> [G * n, H, D]."""
    requests, kv, folded, dim = result.shape
    result = result.view(requests, kv, folded // queries, queries, dim).permute(0, 3, 1, 2, 4)
    return result.reshape(requests * queries, -1, dim)
