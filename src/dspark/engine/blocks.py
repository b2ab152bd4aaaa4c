"""Draft blocks as the engine reads them: a row for every request of a step."""

import numpy as np
import torch

from dspark.nn.seams import DraftBlock


def spread(block: DraftBlock, rows: np.ndarray, count: int) -> DraftBlock:
    """The same block with row i at `rows[i]` of `count`; the other rows are never admitted."""
    index = torch.from_numpy(rows).to(block.tokens_RK.device)

    def at_rows(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(count, *values.shape[1:]).index_copy_(0, index, values)

    return DraftBlock(
        at_rows(block.tokens_RK),
        at_rows(block.candidates_RKC),
        at_rows(block.probs_RKC),
        None if block.confidence_RK is None else at_rows(block.confidence_RK),
        None if block.lengths_R is None else at_rows(block.lengths_R),
        block.head_seconds,
    )


def proposed_lengths(draft: DraftBlock | None) -> list[int]:
    """Proposals of each row."""
    if draft is None:
        return []
    if draft.lengths_R is not None:
        return draft.lengths_R.tolist()
    return [draft.tokens_RK.shape[1]] * draft.tokens_RK.shape[0]


def confidence_rows(draft: DraftBlock | None) -> list[tuple[float, ...]]:
    """Raw confidence logits of each row; [] without a confidence head."""
    if draft is None or draft.confidence_RK is None:
        return []
    return [tuple(row) for row in draft.confidence_RK.tolist()]
