"""Blocks as the engine reads them: moved to their rows, read row by row, and none of them NaN."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspark.core.errors import DSparkError
from dspark.engine.blocks import confidence_rows, spread
from dspark.engine.constraints import sound_draft
from dspark.nn.seams import DraftBlock

BLOCK = DraftBlock(
    tokens_RK=torch.tensor([[1, 2], [3, 4]]),
    candidates_RKC=torch.arange(12).view(2, 2, 3),
    probs_RKC=torch.full((2, 2, 3), 1 / 3, dtype=torch.float64),
    confidence_RK=torch.tensor([[0.5, 1.5], [2.5, 3.5]]),
    entropy_RK=torch.tensor([[0.25, 0.75], [1.25, 1.75]]),
    head_seconds=0.125,
)


def test_rows_move_with_all_that_is_said_of_them():
    moved = spread(BLOCK, np.array([0, 2]), 3)
    assert moved.tokens_RK.tolist() == [[1, 2], [0, 0], [3, 4]]
    assert confidence_rows(moved) == [
        ((0.5, 1.5), (0.25, 0.75)), ((0.0, 0.0), (0.0, 0.0)), ((2.5, 3.5), (1.25, 1.75))
    ]  # fmt: skip
    assert moved.candidates_RKC[2].equal(BLOCK.candidates_RKC[1])
    assert moved.probs_RKC[2].equal(BLOCK.probs_RKC[1])
    assert moved.lengths_R is None and moved.head_seconds == 0.125
    bare = replace(BLOCK, confidence_RK=None, entropy_RK=None, lengths_R=torch.tensor([2, 1]))
    moved = spread(bare, np.array([0, 2]), 3)
    assert confidence_rows(moved) == confidence_rows(None) == []
    assert moved.lengths_R is not None and moved.lengths_R.tolist() == [2, 0, 1]


@pytest.mark.parametrize("name", ["probs_RKC", "confidence_RK", "entropy_RK"])
def test_a_request_whose_draft_holds_a_nan_fails_alone(name):
    """A greedy draft is one-hot, finite even where its logits are not: its entropy is not."""
    values = getattr(BLOCK, name).clone()
    values[1, 0] = torch.nan
    states = [SimpleNamespace(error=None), SimpleNamespace(error=None)]
    sound = sound_draft(replace(BLOCK, **{name: values}), states)
    assert states[0].error is None
    assert isinstance(states[1].error, DSparkError)
    assert not getattr(sound, name).isnan().any()
    assert sound_draft(BLOCK, states) is BLOCK
