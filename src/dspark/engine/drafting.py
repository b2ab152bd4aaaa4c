"""The drafter's side of a step: blocks before the target's forward, context K/V after it."""

import numpy as np
import torch

from dspark.engine.batch import StepBatch
from dspark.engine.blocks import lengthened, spread
from dspark.engine.constraints import draft_adjust, sound_draft
from dspark.engine.draft_context import DraftContext
from dspark.engine.request import RequestState
from dspark.nn.kv_cache import KVStore
from dspark.nn.noise import StepNoise
from dspark.nn.seams import DraftBlock, Drafter, TargetOutput
from dspark.nn.verification import Verified


class Drafting:
    """A drafter with its store. `device` is the target's; a drafter without taps has no context."""

    def __init__(self, drafter: Drafter, store: KVStore, device: torch.device) -> None:
        self._drafter = drafter
        self._shorter = {drafter.block_size: drafter}
        self._store = store
        self._device = device
        self.context = DraftContext(drafter, store) if drafter.tap_layers else None

    def blocks(self, decoding: list[RequestState], wanted: np.ndarray, length: int) -> DraftBlock:
        """Blocks of the decoding requests that want one, a row a request, with `length` slots."""
        chosen = np.flatnonzero(wanted)
        if length not in self._shorter:
            self._shorter[length] = self._drafter.shortened(length)
        drafter, whole = self._shorter[length], self._drafter.block_size
        states = [decoding[r] for r in chosen]
        if self.context is not None:
            self.context.write(states)
        rounds = [state.peek_round() for state in states]
        block = drafter.draft(
            torch.tensor([state.anchor for state in states], device=self._device),
            torch.tensor([state.cached for state in states], device=self._device),
            [state.table for state in states],
            self._store,
            texts=[state.text for state in states],
            sampling=[state.request.params for state in states],
            noise=StepNoise(rounds, drafter.block_size),
            adjust=draft_adjust(states),
        )
        block = lengthened(sound_draft(block, states), whole)
        return block if len(states) == len(decoding) else spread(block, chosen, len(decoding))

    def extend(self, batch: StepBatch, verified: Verified | None, output: TargetOutput) -> None:
        """Every committed position's features become context K/V, before a draft reads them
        (law 7)."""
        if self.context is None:
            return
        assert output.taps_NF is not None
        starts = batch.ragged.starts
        accepted = verified.accepted_R.tolist() if verified is not None else []
        decoding = len(batch.ragged.tables) - len(batch.prefill)
        prefilled = [state for state, _ in batch.prefill]
        for r, state in enumerate([*batch.sampled[:decoding], *prefilled]):
            end = starts[r] + 1 + accepted[r] if r < decoding else starts[r + 1]
            if state.table.pages:  # finished requests have given theirs back
                self.context.keep(state, output.taps_NF[starts[r] : end])
        self.context.write(state for state in prefilled if state.table.pages)
        self.context.write_full(state for state in batch.sampled[:decoding] if state.table.pages)
