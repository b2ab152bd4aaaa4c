"""Exact verification of drafted tokens over a ragged batch, under two rules (DESIGN decision 7).

`rejection` (paper, section 2; speculative sampling): a token x is accepted with probability
min(1, target(x) / draft(x)); the first rejected one is replaced by a draw from the normalised
(target - draft)+; if all are accepted, a bonus token is drawn from the target.

`coupled`: the emitted token is the winner of an exponential race under the target's probabilities,
with noise that draft and target share; a draft token is accepted while it is that winner.

Both rules may be mixed in a batch. Greedy requests are `rejection` on one-hot rows. The precision
is that of the inputs; comparisons and the final draw are float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dspark.nn.noise import VerificationNoise
from dspark.nn.sampling import inverse_cdf, race
from dspark.nn.seams import DraftBlock


@dataclass(frozen=True, slots=True)
class Verified:
    accepted_R: Tensor
    """int64 number of accepted draft tokens: request r emits `draft.tokens_RK[r, :accepted]`,"""
    next_token_R: Tensor
    """then this: the corrected token, or the bonus token where all admitted ones were accepted."""


def verify(
    target_probs_MV: Tensor,
    admitted: Sequence[int],
    draft: DraftBlock | None,
    noise: VerificationNoise,
) -> Verified:
    """Accepts a prefix of every request's admitted draft tokens and draws the token after it.

    Request r owns `admitted[r] + 1` consecutive rows of `target_probs_MV`: the target's
    distribution after its anchor, after its first draft token, and so on. `draft` holds all R
    requests (whatever it says beyond `admitted[r]` is ignored) and is None for plain decoding and
    prefill.
    """
    rows = [count + 1 for count in admitted]
    assert target_probs_MV.shape[0] == sum(rows), (target_probs_MV.shape, admitted)
    device = target_probs_MV.device
    starts_R = torch.tensor([0, *accumulate(rows)][:-1], dtype=torch.int64, device=device)
    raced_M = _race_rows(target_probs_MV, rows, noise)
    coupled_R = torch.tensor([races is not None for races in noise.races], device=device)

    accepted_R = torch.zeros_like(starts_R)
    if draft is not None and max(admitted) > 0:
        slots_K = torch.arange(max(admitted), device=device)
        admitted_R1 = torch.tensor(admitted, device=device)[:, None]
        tokens_RK = draft.tokens_RK[:, : len(slots_K)]
        rows_RK = starts_R[:, None] + slots_K.minimum(admitted_R1)
        # Uniforms are below 1 and the comparison is strict: a token that is impossible under the
        # target is never accepted, one that it likes at least as well as the draft always is.
        threshold_RK = noise.accept_RK * _probs_of(tokens_RK, draft)
        passes_RK = threshold_RK < target_probs_MV[rows_RK, tokens_RK]
        if raced_M is not None:
            passes_RK = torch.where(coupled_R[:, None], tokens_RK == raced_M[rows_RK], passes_RK)
        accepted_R = (passes_RK & (slots_K < admitted_R1)).cumprod(-1).sum(-1)

    last_rows_R = starts_R + accepted_R
    if raced_M is not None and all(races is not None for races in noise.races):
        return Verified(accepted_R, raced_M[last_rows_R])
    weights_RV = _final_weights(target_probs_MV[last_rows_R], accepted_R, admitted, draft)
    next_R = inverse_cdf(weights_RV, noise.emit_R)
    if raced_M is not None:
        next_R = torch.where(coupled_R, raced_M[last_rows_R], next_R)
    return Verified(accepted_R, next_R)


def _race_rows(target_probs_MV: Tensor, rows: list[int], noise: VerificationNoise) -> Tensor | None:
    """The winner of every row of a `coupled` request, 0 elsewhere; None without such a request."""
    if all(races is None for races in noise.races):
        return None
    zero = torch.zeros((), dtype=torch.int64, device=target_probs_MV.device)
    # Row by row, because [M, V] float64 at once falls out of the cache and takes twice as long.
    exponentials = [
        row
        for races, count in zip(noise.races, rows, strict=True)
        for row in races or (None,) * count
    ]
    return torch.stack(
        [
            zero if row is None else race(probs_V, row)
            for probs_V, row in zip(target_probs_MV, exponentials, strict=True)
        ]
    )


def _probs_of(tokens_RK: Tensor, draft: DraftBlock) -> Tensor:
    """Draft probability [R, K] of the tokens that were drafted."""
    slots = tokens_RK.shape[1]
    drafted_RKC = draft.candidates_RKC[:, :slots] == tokens_RK[:, :, None]
    return torch.where(drafted_RKC, draft.probs_RKC[:, :slots], 0.0).sum(-1)


def _final_weights(
    target_RV: Tensor, accepted_R: Tensor, admitted: Sequence[int], draft: DraftBlock | None
) -> Tensor:
    """float64 weights of the last token: (target - draft)+ after a rejection, else the target."""
    weights_RV = target_RV.double()
    if draft is None:
        return weights_RV
    requests_R = torch.arange(len(admitted), device=accepted_R.device)
    slots_R = accepted_R.clamp(max=draft.tokens_RK.shape[1] - 1)
    rejected_R = accepted_R < torch.tensor(admitted, device=accepted_R.device)
    draft_RC = draft.probs_RKC[requests_R, slots_R] * rejected_R[:, None]
    candidates_RC = draft.candidates_RKC[requests_R, slots_R]
    # Not in place: for float64 inputs `weights_RV` is the caller's tensor.
    weights_RV = weights_RV.scatter_add(-1, candidates_RC, -draft_RC).clamp_(min=0.0)
    # A rejection implies that the residual has mass; only rounding can leave none, and then the
    # target itself is what remains.
    empty_R1 = weights_RV.amax(-1, keepdim=True) == 0
    return torch.where(empty_R1, target_RV.double(), weights_RV)
