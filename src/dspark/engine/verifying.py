"""From a step's logits to what each request accepts."""

import numpy as np

from dspark.engine.batch import StepBatch
from dspark.engine.blocks import spread
from dspark.engine.constraints import blame_dead_ends, target_logits
from dspark.nn.noise import StepNoise
from dspark.nn.sampling import SamplingRows, probs_from_logits
from dspark.nn.seams import DraftBlock, TargetOutput
from dspark.nn.verification import Verified, verify


def verify_step(
    batch: StepBatch, draft: DraftBlock | None, output: TargetOutput
) -> Verified | None:
    """A row for each of `batch.sampled`; None where nobody samples.

    draft: a row for each decoding request; those whose prompt has just ended have none.
    """
    if not batch.sampled:
        return None
    logits_MV = output.logits_MV[: len(batch.row_params)]
    logits_MV, dead_M = target_logits(batch, draft, logits_MV)
    params = [state.request.params for state in batch.sampled]
    probs_MV = probs_from_logits(
        logits_MV, SamplingRows.of(params, batch.row_params, logits_MV.device)
    )
    noise = StepNoise([state.peek_round() for state in batch.sampled])
    if draft is not None and len(batch.sampled) > draft.tokens_RK.shape[0]:
        rows = np.arange(draft.tokens_RK.shape[0])
        draft = spread(draft, rows, len(batch.sampled))
    verified = verify(probs_MV, batch.admitted, draft, noise.verification(batch.admitted))
    if dead_M is not None:
        blame_dead_ends(batch, verified.accepted_R, dead_M)
    return verified
