"""Which tokens a slot may propose: the best of the base logits (DESIGN decision 9)."""

import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64


def top_candidates(logits_MV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, descending, and their columns, each [M, count].

    A row's best `count` entries lie in the `count` chunks with the largest maxima, so all but those
    are dropped before sorting: 0.2 ms instead of 6 for 7 rows of 49,152 on a CPU, with the same
    values.
    """
    M, V = logits_MV.shape
    chunks = -(-V // _CHUNK)
    if chunks <= 2 * count:
        values, columns = logits_MV.topk(count)
        return values, columns
    if V % _CHUNK:
        logits_MV = F.pad(logits_MV, (0, chunks * _CHUNK - V), value=-float("inf"))
    by_chunk = logits_MV.view(M, chunks, _CHUNK)
    best = by_chunk.amax(-1).topk(count, sorted=False).indices
    kept = by_chunk.gather(1, best[:, :, None].expand(-1, -1, _CHUNK)).flatten(1)
    values, places = kept.topk(count)
    return values, best.gather(1, places // _CHUNK) * _CHUNK + places % _CHUNK
