"""The ragged batch of one step: decode, verification and prefill rows side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.engine.logprobs import rows_to_score
from dspark.engine.request import RequestState
from dspark.nn.seams import DraftBlock, RaggedBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    ragged: RaggedBatch
    logit_rows_M: Tensor
    """Rows that are sampled from (all of decoding requests, the last of a prompt that ends), then
    those of prompts that are scored."""
    row_params: tuple[int, ...]
    """For each of the rows that are sampled from: index into `sampled`."""
    sampled: tuple[RequestState, ...]
    """Requests that get a token this step: the decoding ones, then those whose prompt ends here."""
    admitted: tuple[int, ...]
    """Draft tokens to verify, per sampled request."""
    first_rows: tuple[int, ...]
    """Per sampled request: its first of the M rows."""
    prefill: tuple[tuple[RequestState, int], ...]
    """Prefilling requests and the tokens of theirs in this step."""
    scored: tuple[slice, ...]
    """Per prefilling request: those of the M rows that its prompt is scored from."""


def build_batch(
    decoding: Sequence[RequestState],
    prefilling: Sequence[RequestState],
    draft: DraftBlock | None,
    admitted: Sequence[int],
    *,
    chunk_tokens: int,
    row_exact: bool,
    device: torch.device | str = "cpu",
) -> StepBatch:
    """A decoding request brings its anchor and `admitted` draft tokens, a prefilling one its chunk.

    `draft` has a row for each of `decoding`, `admitted` a count; `row_exact` is `EngineConfig`'s.
    """
    drafted = draft.tokens_RK.tolist() if draft is not None else []
    runs: list[tuple[RequestState, list[int]]] = []
    for r, state in enumerate(decoding):
        tokens = drafted[r][: admitted[r]] if admitted[r] else []
        runs.append((state, [state.anchor, *tokens]))
    chunks = []
    # Generated tokens that a preemption lost stand with the decoding ones.
    for state in sorted(prefilling, key=lambda s: s.cached < len(s.request.prompt)):
        chunk = list(state.chunk(chunk_tokens))
        chunks.append((state, len(chunk)))
        runs.append((state, chunk))

    starts = [0]
    logit_rows: list[int] = []
    first_rows: list[int] = []
    row_params: list[int] = []
    sampled: list[RequestState] = []
    for index, (state, tokens) in enumerate(runs):
        start = starts[-1]
        starts.append(start + len(tokens))
        decodes = index < len(decoding)
        begins = not state.output and state.cached + len(tokens) == state.known
        if decodes or (begins and not state.request.scores_only):
            first_rows.append(len(logit_rows))
            rows = range(start, starts[-1]) if decodes else range(starts[-1] - 1, starts[-1])
            logit_rows += rows
            row_params += [len(sampled)] * len(rows)
            sampled.append(state)
    scored = []
    for start, (state, count) in zip(starts[len(decoding) :], chunks, strict=False):
        asked = rows_to_score(state, count)
        scored.append(slice(len(logit_rows), len(logit_rows) + len(asked)))
        logit_rows += [start + row for row in asked]
    in_prompt = (state.cached < len(state.request.prompt) for state, _ in runs)
    first_prompt = next((r for r, own in enumerate(in_prompt) if own), len(runs))
    spans = [(state, state.cached, state.cached + len(tokens)) for state, tokens in runs]
    ragged = RaggedBatch(
        tokens_N=torch.tensor([token for _, tokens in runs for token in tokens]).to(device),
        positions_N=torch.cat([torch.arange(start, end) for _, start, end in spans]).to(device),
        requests_N=torch.repeat_interleave(
            torch.arange(len(runs)), torch.tensor([len(tokens) for _, tokens in runs])
        ).to(device),
        slots_N=torch.cat([state.table.slots(*span) for state, *span in spans]).to(device),
        starts=tuple(starts),
        context_lengths=tuple(end for _, _, end in spans),
        tables=tuple(state.table for state, _ in runs),
        prompt_from=starts[first_prompt] if first_prompt < len(runs) else None,
        exact=row_exact and any(state.request.exact for state, _ in runs),
    )
    return StepBatch(
        ragged=ragged,
        logit_rows_M=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        row_params=tuple(row_params),
        sampled=tuple(sampled),
        admitted=(*admitted, *[0] * (len(sampled) - len(decoding))),
        first_rows=tuple(first_rows),
        prefill=tuple(chunks),
        scored=tuple(scored),
    )
