"""Attention of draft blocks: shared context and the block itself, in one softmax.

Concatenating both for a stock attention kernel would copy the whole context for every layer of
every round, and in training would score each block against all others only to mask them.
"""

import torch
from torch import Tensor


def block_attention(
    queries_AKHd: Tensor,
    context_keys_NGd: Tensor,
    context_values_NGd: Tensor,
    keys_AJGd: Tensor,
    values_AJGd: Tensor,
    visible_AN: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention of A blocks of K slots to N shared context rows and to themselves.

    A slot sees all J keys of its own block (J is K where slots see each other in both directions);
    blocks never see one another. Context row
    n is seen by block a where `visible_AN` is true (None: everywhere). H query heads share G key
    heads. Scores and softmax are float32. Returns [A, K, H * d], in the values' dtype.
    """
    A, K, H, d = queries_AKHd.shape
    N, G = context_keys_NGd.shape[:2]
    S = H // G
    # Every key head serves its S query heads as extra rows of one product: keys are never repeated.
    queries = (queries_AKHd * d**-0.5).view(A, K, G, S, d).permute(2, 3, 0, 1, 4)
    queries = queries.reshape(G, S * A * K, d)
    context = torch.bmm(queries, context_keys_NGd.permute(1, 2, 0))
    if visible_AN is not None:
        hidden = ~visible_AN[:, None, :].expand(A, K, N).reshape(1, A * K, N)
        context.masked_fill_(hidden.repeat(1, S, 1), -torch.inf)
    own = torch.matmul(queries.view(G, S * A, K, d), _repeat(keys_AJGd, S).transpose(-1, -2))
    scores = torch.cat([context.view(G, S * A, K, N), own], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values_AJGd.dtype)
    shared, block = weights.split([N, keys_AJGd.shape[1]], -1)
    out = torch.bmm(shared.reshape(G, S * A * K, N), context_values_NGd.transpose(0, 1))
    out = out.view(G, S * A, K, d) + torch.matmul(block, _repeat(values_AJGd, S))
    return out.view(G, S, A, K, d).permute(2, 3, 0, 1, 4).reshape(A, K, H * d)


def _repeat(x_AKGd: Tensor, times: int) -> Tensor:
    """[A, K, G, d] -> [G, times * A, K, d]: small enough to copy, and then one flat batch."""
    return x_AKGd.permute(2, 0, 1, 3).repeat(1, times, 1, 1)
