"""Prompt lookup: what followed the last tokens the previous time they stood in the text.

No weights, no features and no training, so any target has a drafter from the first minute, and
every trained one has a floor to beat (Saxena 2023, "prompt lookup decoding").
"""

from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.pages import PageTable
from dspark.nn.seams import DraftAdjust, DraftBlock, DraftNoise

Tokens = npt.NDArray[np.int64]


class PromptLookup:
    """Continues the longest n-gram that ends the text from its latest earlier occurrence.

    A proposal is certain: one candidate of draft probability 1. So `rejection` accepts it with the
    target's own probability of it, `coupled` where the target draws it. Without a match of at least
    `shortest` tokens nothing is proposed and the round is plain decoding.
    """

    tap_layers: tuple[int, ...] = ()
    kv_shape = KVShape((), (), ())

    def __init__(self, block_size: int = 7, *, longest: int = 5, shortest: int = 2) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}; it must be at least 1")
        if not 1 <= shortest <= longest:
            raise ConfigError(
                f"n-grams of {shortest} to {longest} tokens; the shortest must have at least 1 and "
                f"no more than the longest"
            )
        self.block_size = block_size
        self.longest, self.shortest = longest, shortest

    def shortened(self, block_size: int) -> Self:
        """See `Drafter.shortened`."""
        shorter = copy(self)
        shorter.block_size = min(block_size, self.block_size)
        return shorter

    def extend_context(
        self,
        taps_NF: Tensor,
        next_tokens_N: Tensor,
        positions_N: Tensor,
        slots_N: Tensor,
        store: KVStore,
    ) -> None:
        """Keeps no context: it reads the text."""

    def draft(
        self,
        anchors_R: Tensor,
        anchor_positions_R: Tensor,
        tables: Sequence[PageTable],
        store: KVStore,
        *,
        texts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        noise: DraftNoise,
        adjust: DraftAdjust | None = None,
    ) -> DraftBlock:
        """One-hot proposals; `lengths_R` says how many a request has. See `Drafter.draft`.

        What a request forbids is proposed as well, and rejected.
        """
        tokens_RK = np.zeros((len(texts), self.block_size), dtype=np.int64)
        lengths_R = np.zeros(len(texts), dtype=np.int64)
        for r, text in enumerate(texts):
            found = continuation(
                np.asarray(text, dtype=np.int64),
                self.block_size, longest=self.longest, shortest=self.shortest,
            )  # fmt: skip
            lengths_R[r] = len(found)
            tokens_RK[r, : len(found)] = found
        tokens = torch.from_numpy(tokens_RK).to(anchors_R.device)
        return DraftBlock(
            tokens_RK=tokens,
            candidates_RKC=tokens[:, :, None],
            probs_RKC=torch.ones(*tokens.shape, 1, dtype=torch.float64, device=tokens.device),
            confidence_RK=None,
            lengths_R=torch.from_numpy(lengths_R),
        )


def continuation(text_T: Tokens, count: int, *, longest: int, shortest: int) -> Tokens:
    """At most `count` tokens after the latest earlier occurrence of the longest n-gram that ends
    the text (of `longest` to `shortest` tokens); empty where there is none.

    The occurrence may overlap the end: a text that repeats itself is continued periodically.
    """
    T = len(text_T)
    # Ends of earlier n-grams, extended to the left token by token: those that still match.
    ends = np.flatnonzero(text_T[:-1] == text_T[-1:])
    best = ends[:0]
    for size in range(1, min(longest, T - 1) + 1):
        if size > 1:
            ends = ends[ends >= size - 1]
            ends = ends[text_T[ends - (size - 1)] == text_T[T - size]]
        if len(ends) == 0:
            break
        if size >= shortest:
            best = ends
    if len(best) == 0:
        return text_T[:0]
    start = int(best[-1]) + 1
    # Past the end of the text its own continuation goes on: position T is a copy of `start`.
    period = T - start
    return text_T[start + np.arange(count) % period]
