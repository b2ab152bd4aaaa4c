"""The drafter's context K/V, made from committed features in batches (law 7, DESIGN decision 11).

A request that does not draft needs no context yet, and projecting one row at a time would cost as
much as reading the drafter's weights every step. So features of decoded tokens wait on their
request until it drafts or `MOST_WAITING` of them have come together. Features of prompts are
written at once: there are many, and their pages may be shared.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dspark.engine.request import RequestState
from dspark.nn.kv_cache import KVStore
from dspark.nn.seams import Drafter

MOST_WAITING = 64
"""Rows of one request: what its features may take beside the KV budget."""


class DraftContext:
    def __init__(self, drafter: Drafter, store: KVStore) -> None:
        self._drafter = drafter
        self._store = store

    def keep(self, state: RequestState, taps_nF: Tensor) -> None:
        """Takes features of the last `n` positions that `state` has in the cache."""
        first = state.cached - len(taps_nF)
        if state.features and state.features_end != first:
            state.features.clear()  # their pages were lost, and these come from another pass
        state.features.append(taps_nF.clone())  # a step's rows are not kept alive for one request
        state.features_end = state.cached

    def write(self, states: Iterable[RequestState]) -> None:
        """Makes context K/V of everything that waits on these requests."""
        waiting = [state for state in states if state.features]
        if not waiting:
            return
        spans = [
            (state, state.features_end - sum(map(len, state.features)), state.features_end)
            for state in waiting
        ]
        taps_NF = torch.cat([piece for state in waiting for piece in state.features])
        next_tokens = [t for s, start, end in spans for t in s.text[start + 1 : end + 1]]
        positions_N = torch.cat([torch.arange(start, end) for _, start, end in spans])
        slots_N = torch.cat([state.table.slots(start, end) for state, start, end in spans])
        self._drafter.extend_context(
            taps_NF,
            torch.tensor(next_tokens, device=taps_NF.device),
            positions_N.to(taps_NF.device),
            slots_N.to(taps_NF.device),
            self._store,
        )
        for state in waiting:
            state.features.clear()

    def write_full(self, states: Iterable[RequestState]) -> None:
        """The same for those of them that have enough waiting to be worth a pass."""
        self.write([state for state in states if sum(map(len, state.features)) >= MOST_WAITING])
