"""Requests and their logits: bias, penalties and what is forbidden, in draft and target alike.

Whatever goes wrong for one request here (a grammar, logits that are not finite) is put down in its
`RequestState.error`, and ends that request alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dspark.core.errors import DSparkError
from dspark.engine.batch import StepBatch
from dspark.engine.request import Request, RequestState
from dspark.nn.logit_transforms import LogitRow, LogitState, transform_logits
from dspark.nn.seams import DraftAdjust, DraftBlock


def logit_state(
    request: Request, vocab_size: int, eos: Collection[int], device: torch.device
) -> LogitState | None:
    """What the request does to its logits; None for nothing, which then costs nothing."""
    params = request.params
    if not LogitState.wanted_by(params):
        return None
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    return LogitState(
        params,
        request.prompt,
        vocab_size,
        end_token_ids=ends,
        grammar=request.grammar,
        device=device,
    )


def draft_adjust(states: Sequence[RequestState]) -> DraftAdjust | None:
    """For a draft of these requests; None when none of them wants any of it."""
    if all(state.logits is None for state in states):
        return None

    def adjust(drafted_Rk: Tensor, ids_RC: Tensor, logits_RC: Tensor) -> Tensor:
        rows = _rows(states, drafted_Rk.tolist())
        return transform_logits(logits_RC, rows, ids_RC)[0]

    return adjust


def sound_draft(block: DraftBlock, states: Sequence[RequestState]) -> DraftBlock:
    """The block without numbers that are none; the requests they were drafted for fail."""
    said = [own for own in (block.confidence_RK, block.entropy_RK) if own is not None]
    if torch.isfinite(block.probs_RKC).all() and not any(own.isnan().any() for own in said):
        return block
    bad_R = ~torch.isfinite(block.probs_RKC).flatten(1).all(-1)
    for own_RK in said:
        bad_R |= own_RK.isnan().any(-1)
    _blame(states, bad_R, "the drafter's probabilities are not finite; check the bundle's "
           "weights, or use --policy off")  # fmt: skip
    return replace(
        block,
        probs_RKC=block.probs_RKC.nan_to_num(0.0, 0.0, 0.0),
        confidence_RK=None if block.confidence_RK is None else block.confidence_RK.nan_to_num(0.0),
        entropy_RK=None if block.entropy_RK is None else block.entropy_RK.nan_to_num(0.0),
    )


def target_logits(
    batch: StepBatch, draft: DraftBlock | None, logits_MV: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What is sampled from [M, V], and the rows [M] at which nothing is allowed, if any could be.

    A row of a decoding request stands behind the draft tokens that it has admitted before it.
    """
    # One pass: a row's sum is finite where all of it is. Logits whose sum overflows are no logits.
    finite_M = torch.isfinite(logits_MV.sum(-1))
    if not finite_M.all():
        owner_M = torch.tensor(batch.row_params, device=logits_MV.device)
        bad_R = torch.zeros(len(batch.sampled), dtype=torch.bool, device=logits_MV.device)
        bad_R[owner_M[~finite_M]] = True
        _blame(batch.sampled, bad_R, "the target's logits are not finite; check its weights")
        logits_MV = torch.where(finite_M[:, None], logits_MV, 0.0)
    if all(state.logits is None for state in batch.sampled):
        return logits_MV, None
    tokens = draft.tokens_RK.tolist() if draft is not None else []
    states, drafted = [], []
    for r, (state, admitted) in enumerate(zip(batch.sampled, batch.admitted, strict=True)):
        states += [state] * (admitted + 1)
        drafted += [tokens[r][:slot] if slot else [] for slot in range(admitted + 1)]
    return transform_logits(logits_MV, _rows(states, drafted))


def blame_dead_ends(batch: StepBatch, accepted_R: Tensor, dead_M: Tensor) -> None:
    """Requests whose last token of the step was drawn where nothing is allowed fail."""
    last_R = torch.tensor(batch.first_rows, device=dead_M.device) + accepted_R
    _blame(
        batch.sampled,
        dead_M[last_R],
        "no token may come next: banned_token_ids, min_tokens and the grammar leave none",
    )


def _rows(
    states: Sequence[RequestState], drafted: Sequence[Sequence[int]]
) -> list[LogitRow | None]:
    rows: list[LogitRow | None] = []
    for state, tokens in zip(states, drafted, strict=True):
        row = None
        if state.logits is not None and state.error is None:
            try:
                row = state.logits.row(tokens)
            except Exception as error:
                state.error = error
        rows.append(row)
    return rows


def _blame(states: Sequence[RequestState], bad_R: Tensor, message: str) -> None:
    for state, bad in zip(states, bad_R.tolist(), strict=True):
        if bad and state.error is None:
            state.error = DSparkError(message)
