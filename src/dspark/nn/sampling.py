"""From logits to the probabilities that are sampled from, and the draw itself.

Drafter and verifier call the same function: what a token was sampled from is exactly what it is
divided by. The precision is that of the logits given: float32 for a target, float64 for the few
candidates of a drafter and for the law tests.

No result here depends on which other rows are in the batch: a sum over one long row may be split
across threads and then rounds differently, so rows are reduced only by softmax, max and cumsum,
which are exact per row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams

MIN_TEMPERATURE = 1e-30
"""Logits up to 1e8 stay finite in float32 above it; its softmax cannot tell what lies below."""

_NUCLEUS_GUESS = 1024
"""Tokens looked at first for top-p: most nuclei fit, and sorting all of V costs ten times more."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of M rows of logits, as columns; what no row asks for is left out."""

    temperature_M1: Tensor | None
    """float64; 1 at greedy rows; None when every row is greedy or has temperature 1."""
    greedy: Tensor | None
    """int64 indices of the greedy rows; None when there are none."""
    all_greedy: bool
    truncated: Tensor | None
    """int64 indices of the T rows with top-k, top-p or min-p; None when there are none."""
    top_k_T1: Tensor
    """int64; 0 is off."""
    top_p_T1: Tensor
    """float64; infinity is off."""
    min_p_T1: Tensor
    """float64; 0 is off."""
    sort_width: int
    """Likeliest tokens to look at first; 0 when no row asks for top-k or top-p."""
    any_min_p: bool

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        requests: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> "SamplingRows":
        """Row m is sampled as `params[requests[m]]`; by default one row a request."""
        rows = list(params) if requests is None else [params[request] for request in requests]
        greedy = [m for m, row in enumerate(rows) if row.temperature == 0]
        truncated = [m for m, row in enumerate(rows) if row.temperature > 0 and truncates(row)]
        cut = [rows[m] for m in truncated]
        heated = any(row.temperature not in (0, 1) for row in rows)

        def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        def indices(values: list[int]) -> Tensor | None:
            return torch.tensor(values, device=device) if values else None

        return cls(
            temperature_M1=column([max(row.temperature or 1.0, MIN_TEMPERATURE) for row in rows])
            if heated
            else None,
            greedy=indices(greedy),
            all_greedy=len(greedy) == len(rows),
            truncated=indices(truncated),
            top_k_T1=column([row.top_k for row in cut], torch.int64),
            top_p_T1=column([row.top_p if row.top_p < 1 else math.inf for row in cut]),
            min_p_T1=column([row.min_p for row in cut]),
            sort_width=max((_sort_width(row) for row in cut), default=0),
            any_min_p=any(row.min_p > 0 for row in cut),
        )


def probs_from_logits(logits_MV: Tensor, rows: SamplingRows) -> Tensor:
    """Probabilities [M, V] that row m is sampled from, in the dtype of the logits.

    Temperature, then top-k, then top-p over what top-k left, then min-p; what is left is
    renormalised. Temperature 0 is a one-hot row. Equally likely tokens rank by id, lowest first.
    """
    if rows.all_greedy:
        return one_hot_argmax(logits_MV)
    scaled_MV = logits_MV
    if rows.temperature_M1 is not None:
        scaled_MV = logits_MV / rows.temperature_M1.to(logits_MV.dtype)
    probs_MV = scaled_MV.softmax(-1)
    if rows.truncated is not None:
        scaled_TV = scaled_MV[rows.truncated]
        keep_TV = _kept(scaled_TV, probs_MV[rows.truncated], rows)
        probs_MV[rows.truncated] = scaled_TV.masked_fill_(~keep_TV, -math.inf).softmax(-1)
    if rows.greedy is not None:
        probs_MV[rows.greedy] = one_hot_argmax(logits_MV[rows.greedy])
    return probs_MV


def race(probs: Tensor, exponentials: Tensor) -> Tensor:
    """Exponential race over the last dimension: index i wins with probability `probs[..., i]`.

    The winner is argmax(log probs + noise) with the Gumbel noise -log(exponentials). Entries of
    probability 0 never win. Exponentials are float64, so the comparison is too.
    """
    return (probs / exponentials).argmax(-1)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Indices [...] drawn from unnormalised weights [..., V] with one uniform in [0, 1) each.

    An entry of weight 0 is never drawn: the index returned is the first whose cumulated weight
    exceeds `uniform * total`, so its own weight is positive.
    """
    cumulated = weights.double().cumsum(-1)
    thresholds = uniforms.double()[..., None] * cumulated[..., -1:]
    return torch.searchsorted(cumulated, thresholds, right=True)[..., 0]


def one_hot_argmax(logits_MV: Tensor) -> Tensor:
    best_M1 = logits_MV.argmax(-1, keepdim=True)  # the first of several maxima
    return torch.zeros_like(logits_MV).scatter_(-1, best_M1, 1.0)


def truncates(row: SamplingParams) -> bool:
    return row.top_k > 0 or row.top_p < 1 or row.min_p > 0


def _sort_width(row: SamplingParams) -> int:
    if row.top_k > 0:
        return row.top_k
    return _NUCLEUS_GUESS if row.top_p < 1 else 0


def _kept(scaled_TV: Tensor, probs_TV: Tensor, rows: SamplingRows) -> Tensor:
    """Which tokens survive top-k, top-p and min-p: bool [T, V]."""
    if rows.sort_width:
        keep_TV = _likeliest(scaled_TV, probs_TV, rows.top_k_T1, rows.top_p_T1, rows.sort_width)
        if not rows.any_min_p:
            return keep_TV
    floor_T1 = rows.min_p_T1.to(probs_TV.dtype) * probs_TV.amax(-1, keepdim=True)
    above_TV = probs_TV >= floor_T1
    return above_TV & keep_TV if rows.sort_width else above_TV


def _likeliest(
    scaled_TV: Tensor, probs_TV: Tensor, top_k_T1: Tensor, top_p_T1: Tensor, width: int
) -> Tensor:
    """Which tokens survive top-k and top-p: bool [T, V].

    Looks at the `width` likeliest tokens, and at more where a nucleus is larger. Only sorted
    *values* decide, never sorted indices: they don't depend on how a sort orders equal entries, and
    a partial sort of any width gives the same ones.
    """
    vocab = scaled_TV.shape[-1]
    width = min(width, vocab)
    limit_T1 = torch.where(top_k_T1 > 0, top_k_T1, vocab).clamp(max=vocab)
    # One value more than may be kept shows whether the last kept one has an equal that is not.
    values_TW, order_TW = scaled_TV.topk(min(width + 1, vocab), dim=-1)
    mass_TW = probs_TV.gather(-1, order_TW).double().cumsum(-1)
    total_T1 = torch.where(top_k_T1 > 0, mass_TW.gather(-1, limit_T1.clamp(max=width) - 1), 1.0)
    mass_before_TW = torch.nn.functional.pad(mass_TW[:, : width - 1], (1, 0))
    ranks_W = torch.arange(width, device=scaled_TV.device)
    inside_TW = (ranks_W < limit_T1) & (mass_before_TW < top_p_T1 * total_T1)
    count_T1 = inside_TW.sum(-1, keepdim=True)

    last_T1 = values_TW.gather(-1, count_T1 - 1)
    keep_TV = scaled_TV >= last_T1
    next_T1 = values_TW.gather(-1, count_T1.clamp(max=values_TW.shape[1] - 1))
    if ((next_T1 == last_T1) & (count_T1 < vocab)).any():
        equal_TV = scaled_TV == last_T1
        equal_kept_T1 = count_T1 - (values_TW > last_T1).sum(-1, keepdim=True)
        keep_TV &= ~equal_TV | (equal_TV.cumsum(-1) <= equal_kept_T1)
    if width < vocab:
        unfinished = ((count_T1 == width) & (limit_T1 > width))[:, 0].nonzero()[:, 0]
        if len(unfinished):
            keep_TV[unfinished] = _likeliest(
                scaled_TV[unfinished],
                probs_TV[unfinished],
                top_k_T1[unfinished],
                top_p_T1[unfinished],
                8 * width,
            )
    return keep_TV
