"""What attention of one ragged step is made of: who attends to what, in which kernel calls.

An `AttentionPlan` is built once a step and shared by all layers: which rows attend to which keys,
the masks, and the groups of requests that one kernel call can serve.

Exactness (law 5): in exact mode a row reads its keys up to the end of its own tile of FUSED_TILE
positions (the rest masked), so how many keys it reads depends on its position alone; rows of one
request that end in different tiles go into different calls.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.nn.seams import RaggedBatch

FUSED_TILE = 256
"""Keys that exact `ragged_attention` reads at a time: requests whose last key is in the same tile
can share a call. Smaller tiles would save little for short texts (a call alone costs as much as 100
keys) and part the requests of a batch into more calls."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows of one request that read the same keys."""

    request: int
    start: int
    queries: int
    keys: int


@dataclass(frozen=True, slots=True)
class Group:
    """Segments of equal size that one kernel call serves: their rows are neighbours, and so, at a
    constant stride, are their keys in the store."""

    requests: range
    rows: slice
    queries: int
    keys: int
    """Keys read per request, padding included."""
    first_slot: int | None
    """Where the first request's keys begin; None if they are scattered (a single request)."""
    stride: int
    """Slots from one request's keys to the next; 0: a single request."""


@dataclass(slots=True)
class AttentionPlan:
    batch: RaggedBatch
    groups: list[Group]
    _masks: dict[tuple[int, int, int | None, torch.dtype, int], Tensor | None] = field(
        default_factory=dict
    )

    @property
    def slots_N(self) -> Tensor:
        return self.batch.slots_N

    @classmethod
    def build(cls, batch: RaggedBatch) -> "AttentionPlan":
        segments = _segments(batch)
        groups: list[Group] = []
        first = 0
        while first < len(segments):
            last = _group_end(batch, segments, first)
            head, tail = segments[first], segments[last - 1]
            groups.append(
                Group(
                    requests=range(head.request, tail.request + 1),
                    rows=slice(head.start, tail.start + tail.queries),
                    queries=head.queries,
                    keys=max(segment.keys for segment in segments[first:last]),
                    first_slot=batch.tables[head.request].first_slot,
                    stride=_slot_stride(batch, head.request) or 0 if last - first > 1 else 0,
                )
            )
            first = last
        return cls(batch, groups)

    def mask(
        self, index: int, heads_per_kv: int, window: int | None, dtype: torch.dtype, tile: int
    ) -> Tensor | None:
        """Additive mask [G, 1, rows, keys] of group `index`, or None.

        Rows are ordered (head in group, query), padded to a multiple of `tile`. Built once a step
        for each kind of layer.
        """
        key = (index, heads_per_kv, window, dtype, tile)
        if key not in self._masks:
            self._masks[key] = self._build_mask(self.groups[index], *key[1:])
        return self._masks[key]

    def _build_mask(
        self, group: Group, heads_per_kv: int, window: int | None, dtype: torch.dtype, tile: int
    ) -> Tensor | None:
        lengths = [self.batch.context_lengths[r] for r in group.requests]
        whole = all(length == group.keys for length in lengths)
        sees_all = group.queries == 1 and whole and (window is None or group.keys <= window)
        if sees_all and not self.batch.exact:
            return None
        device = self.batch.positions_N.device
        positions = self.batch.positions_N[group.rows].view(len(lengths), 1, group.queries, 1)
        keys = torch.arange(group.keys, device=device)
        visible = keys <= positions
        if window is not None:
            visible &= keys > positions - window
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        mask.masked_fill_(~visible, float("-inf"))
        return pad_queries(mask.repeat(1, 1, heads_per_kv, 1), tile)


def _segments(batch: RaggedBatch) -> list[_Segment]:
    """Every request's rows, in exact mode cut where their keys reach into another tile."""
    segments = []
    for r, length in enumerate(batch.context_lengths):
        start, end = batch.starts[r], batch.starts[r + 1]
        if not batch.exact:
            segments.append(_Segment(r, start, end - start, length))
            continue
        while start < end:
            position = length - (end - start)
            keys = (position // FUSED_TILE + 1) * FUSED_TILE
            segments.append(_Segment(r, start, min(end - start, keys - position), keys))
            start += segments[-1].queries
    return segments


def _group_end(batch: RaggedBatch, segments: list[_Segment], first: int) -> int:
    """One past the last segment that can share a kernel call with `first`."""
    head = segments[first]
    stride = _slot_stride(batch, head.request)
    last = first + 1
    while last < len(segments):
        here, before = segments[last], segments[last - 1]
        same_queries = here.queries == head.queries
        # Equal tiles also bound how far past its own pages a member of the group reads.
        same_keys = -(-here.keys // FUSED_TILE) == -(-head.keys // FUSED_TILE)
        in_step = (
            here.request == before.request + 1
            and here.start == before.start + before.queries
            and stride is not None
            and _slot_stride(batch, before.request) == stride
        )
        if not (same_queries and same_keys and in_step):
            break
        last += 1
    return last


def _slot_stride(batch: RaggedBatch, request: int) -> int | None:
    if request + 1 >= len(batch.tables):
        return None
    here, there = batch.tables[request].first_slot, batch.tables[request + 1].first_slot
    return None if here is None or there is None or there <= here else there - here


def pad_queries(x: Tensor, tile: int) -> Tensor:
    """The first row again at the end of dim -2, up to a multiple of `tile`; nobody reads it there.

    (A copy of a row is cheaper than rows of zeros, and as finite as the row is.)"""
    missing = -x.shape[-2] % tile
    if not missing:
        return x
    return torch.cat([x, x[..., :1, :].expand(*x.shape[:-2], missing, x.shape[-1])], dim=-2)
