"""Log-probabilities of tokens under the target, before anything a request does to them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.core.errors import DSparkError
from dspark.core.records import TokenLogprob
from dspark.core.sampling import SamplingParams
from dspark.engine.request import RequestState
from dspark.nn.seams import DraftBlock

_ROWS = 64
"""Rows whose log-probabilities [rows, V] exist at once."""


def token_logprobs(
    params: SamplingParams, logits_MV: Tensor, first_row: int, tokens: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    """Of T tokens, drawn at consecutive rows of the target's own logits; () if not asked for."""
    if params.logprobs is None:
        return ()
    return _entries(logits_MV[first_row : first_row + len(tokens)], tokens, params.logprobs)


def score_prompt(state: RequestState, logits_TV: Tensor) -> None:
    """Adds log-probabilities of the next T prompt tokens, from the rows before each of them.

    Logits that are not finite are put down in `state.error`.
    """
    most = state.request.params.prompt_logprobs
    assert most is not None
    if not state.prompt_logprobs:
        state.prompt_logprobs.append(None)
    if not torch.isfinite(logits_TV).all():
        state.error = DSparkError("the target's logits are not finite; check its weights")
        return
    for rows in logits_TV.split(_ROWS):
        start = len(state.prompt_logprobs)
        tokens = state.request.prompt[start : start + len(rows)]
        state.prompt_logprobs += _entries(rows, tokens, most)


def rows_to_score(state: RequestState, count: int) -> range:
    """Those of the coming `count` positions of a prompt that a log-probability is wanted from: the
    ones before a prompt token that has none yet."""
    if state.request.params.prompt_logprobs is None:
        return range(0)
    start = max(state.cached, len(state.prompt_logprobs) - 1)
    end = min(state.cached + count, len(state.request.prompt) - 1)
    return range(start - state.cached, max(start, end) - state.cached)


def share_rows(prefilling: Sequence[RequestState], most: int) -> list[RequestState]:
    """Those that take part in a step, in which at most `most` rows may come from prompts that are
    scored: the logits of many long ones at once would fill the memory. One of them always does."""
    left = most
    waits = set()
    for state in sorted(prefilling, key=lambda state: state.rank):
        count = len(rows_to_score(state, len(state.chunk(most))))
        if count > left:
            waits.add(state.request.id)
        else:
            left -= count
    return [state for state in prefilling if state.request.id not in waits]


def _entries(logits_TV: Tensor, tokens: Sequence[int], most: int) -> tuple[TokenLogprob, ...]:
    logprobs_TV = logits_TV.log_softmax(-1)
    index_T1 = torch.tensor(tokens, device=logits_TV.device)[:, None]
    own_T = logprobs_TV.gather(1, index_T1)[:, 0].tolist()
    values_TK, ids_TK = logprobs_TV.topk(min(most, logits_TV.shape[1]))
    likeliest = zip(ids_TK.tolist(), values_TK.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, own_T, likeliest, strict=True)
    )


def draft_probs(
    params: SamplingParams, block: DraftBlock, row: int, slots: int, tokens: Sequence[int]
) -> tuple[float, ...]:
    """What a block's first `slots` slots gave the tokens that came out there; () if no
    log-probabilities are asked for. Every one but the last was accepted, so each slot was drawn
    after the very tokens that came out before it."""
    if params.logprobs is None:
        return ()
    tokens = tokens[:slots]
    index_T1 = torch.tensor(tokens, dtype=torch.int64, device=block.tokens_RK.device)[:, None]
    held_TC = block.candidates_RKC[row, : len(tokens)] == index_T1
    probs: list[float] = (block.probs_RKC[row, : len(tokens)] * held_TC).sum(-1).tolist()
    return tuple(probs)
