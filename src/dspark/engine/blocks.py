"""Draft blocks as the engine reads them: a row for every request of a step."""

from dataclasses import replace

import numpy as np
import torch

from dspark.nn.seams import DraftBlock

_NEVER = -100.0
"""Confidence logit of a slot without a proposal."""


def spread(block: DraftBlock, rows: np.ndarray, count: int) -> DraftBlock:
    """The same block with row i at `rows[i]` of `count`; the other rows are never admitted."""
    index = torch.from_numpy(rows).to(block.tokens_RK.device)

    def at_rows(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(count, *values.shape[1:]).index_copy_(0, index, values)

    return replace(
        block,
        tokens_RK=at_rows(block.tokens_RK),
        candidates_RKC=at_rows(block.candidates_RKC),
        probs_RKC=at_rows(block.probs_RKC),
        confidence_RK=None if block.confidence_RK is None else at_rows(block.confidence_RK),
        entropy_RK=None if block.entropy_RK is None else at_rows(block.entropy_RK),
        lengths_R=None if block.lengths_R is None else at_rows(block.lengths_R),
    )


def lengthened(block: DraftBlock, slots: int) -> DraftBlock:
    """The same block with `slots` slots, of which the new ones hold no proposal."""
    rows, own = block.tokens_RK.shape
    if own == slots:
        return block

    def padded(values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        missing = values.new_full((rows, slots - own, *values.shape[2:]), fill)
        return torch.cat([values, missing], dim=1)

    lengths_R = block.lengths_R
    return replace(
        block,
        tokens_RK=padded(block.tokens_RK),
        candidates_RKC=padded(block.candidates_RKC),
        probs_RKC=padded(block.probs_RKC),
        confidence_RK=None if block.confidence_RK is None else padded(block.confidence_RK, _NEVER),
        entropy_RK=None if block.entropy_RK is None else padded(block.entropy_RK),
        lengths_R=torch.full_like(block.tokens_RK[:, 0], own) if lengths_R is None else lengths_R,
    )


def proposed_lengths(draft: DraftBlock | None) -> list[int]:
    """Proposals of each row."""
    if draft is None:
        return []
    if draft.lengths_R is not None:
        return draft.lengths_R.tolist()
    return [draft.tokens_RK.shape[1]] * draft.tokens_RK.shape[0]


def confidence_rows(draft: DraftBlock | None) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Raw confidence logits and entropies of each row; [] without a confidence head."""
    if draft is None or draft.confidence_RK is None or draft.entropy_RK is None:
        return []
    rows = zip(draft.confidence_RK.tolist(), draft.entropy_RK.tolist(), strict=True)
    return [(tuple(logits), tuple(entropies)) for logits, entropies in rows]
