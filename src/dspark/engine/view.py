"""What a policy may know of a round, and what an operator may know of the engine."""

from collections.abc import Sequence

import numpy as np

from dspark.calibration.confidence import conditional_confidence
from dspark.calibration.serving import Snapshot
from dspark.core.records import EngineStats
from dspark.engine.memory import KVMemory
from dspark.engine.places import Places
from dspark.engine.request import RequestState
from dspark.nn.seams import DraftBlock
from dspark.scheduling.policies import RoundView
from dspark.scheduling.survival import survival_probabilities


def round_view(
    step: int,
    decoding: Sequence[RequestState],
    prefill_tokens: int,
    block_size: int,
    *,
    drafted: np.ndarray | None = None,
    draft: DraftBlock | None = None,
    snapshot: Snapshot | None = None,
) -> RoundView:
    """Before drafting, or after it: `drafted` [R] then says who has a draft."""
    room = np.array([state.room(block_size) for state in decoding], dtype=np.int64)
    if drafted is not None:
        room = np.where(drafted, room, 0)
    length = None
    if draft is not None and draft.lengths_R is not None:
        lengths = draft.lengths_R.cpu().numpy()
        room = np.minimum(room, lengths)
        length = int(lengths.max())
    confidence = survival = None
    if draft is not None and draft.confidence_RK is not None:
        logits_RK = draft.confidence_RK.double().cpu().numpy()
        confidence = conditional_confidence(logits_RK)
        assert snapshot is not None and draft.entropy_RK is not None
        entropies_RK = draft.entropy_RK.double().cpu().numpy()
        sampling = [state.request.params for state in decoding]
        calibrated_RK = snapshot.confidence(logits_RK, entropies_RK, sampling)
        survival = survival_probabilities(calibrated_RK)
    return RoundView(
        step=step,
        requests=tuple(state.request.id for state in decoding),
        rounds=tuple(state.rounds for state in decoding),
        block_size=block_size,
        prefill_tokens=prefill_tokens,
        max_admit_R=room,
        draft_length=length,
        context_R=np.array([state.cached for state in decoding], dtype=np.int64),
        confidence_RK=confidence,
        survival_RK=survival,
    )


def engine_stats(places: Places, memory: KVMemory, rebuilt: int) -> EngineStats:
    pool, counts = memory.pool, memory.counts
    return EngineStats(
        running=len(places.running),
        waiting=len(places.waiting),
        waiting_tokens=places.waiting.tokens,
        pages=pool.num_pages,
        pages_free=pool.free_pages,
        pages_kept=pool.kept_pages,
        page_size=pool.page_size,
        preemptions=places.preemptions,
        refused=places.refused,
        prompt_tokens=counts.prompt_tokens,
        prefix_hits=counts.prefix_hits,
        prefix_hit_tokens=counts.prefix_hit_tokens,
        pages_copied=counts.copied_pages,
        pages_evicted=counts.evicted_pages,
        rebuilt_positions=rebuilt,
    )
