"""`nn.sampling.probs_from_logits` with sampling parameters as a tensor, so that it can be captured.

The same probabilities, bit for bit on a CPU. Every row is sorted whole and every parameter is
applied to every row, in the value that changes nothing where it is off: worth it for the few
candidates of a drafter, not for a vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams
from dspark.nn.sampling import MIN_TEMPERATURE, one_hot_argmax, truncates


def sampling_rows(params: Sequence[SamplingParams]) -> Tensor:
    """float64 [R, 5] on the host: temperature, greedy or not, top-k, top-p, min-p."""
    rows = [
        (
            max(row.temperature or 1.0, MIN_TEMPERATURE),
            float(row.temperature == 0),
            float(row.top_k or math.inf),
            row.top_p if row.top_p < 1 else math.inf,
            row.min_p,
        )
        for row in params
    ]
    return torch.tensor(rows, dtype=torch.float64)


def truncates_any(params: Sequence[SamplingParams]) -> bool:
    """Whether rows have to be sorted at all."""
    return any(row.temperature > 0 and truncates(row) for row in params)


def probs_from_rows(logits_RC: Tensor, rows_R5: Tensor, *, truncated: bool) -> Tensor:
    """Probabilities [R, C], in the dtype of the logits; `truncated` is `truncates_any`."""
    temperature_R1, greedy_R1, top_k_R1, top_p_R1, min_p_R1 = rows_R5.split(1, dim=1)
    scaled_RC = logits_RC / temperature_R1.to(logits_RC.dtype)
    probs_RC = scaled_RC.softmax(-1)
    if truncated:
        keep_RC = _kept(scaled_RC, probs_RC, top_k_R1, top_p_R1, min_p_R1)
        probs_RC = scaled_RC.masked_fill(~keep_RC, -math.inf).softmax(-1)
    return torch.where(greedy_R1 > 0, one_hot_argmax(logits_RC), probs_RC)


def _kept(
    scaled_RC: Tensor, probs_RC: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, min_p_R1: Tensor
) -> Tensor:
    """Which candidates survive top-k, top-p and min-p: bool [R, C]. See `nn.sampling._likeliest`
    for the ties."""
    C = scaled_RC.shape[-1]
    limit_R1 = top_k_R1.clamp(max=C)
    values_RC, order_RC = scaled_RC.sort(dim=-1, descending=True)
    mass_RC = probs_RC.gather(-1, order_RC).double().cumsum(-1)
    cut_mass_R1 = mass_RC.gather(-1, limit_R1.long() - 1)
    # Without top-k it is all of 1, whatever the sum has been rounded to.
    total_R1 = cut_mass_R1.masked_fill(top_k_R1.isinf(), 1.0)
    mass_before_RC = torch.nn.functional.pad(mass_RC[:, :-1], (1, 0))
    ranks_C = torch.arange(C, device=scaled_RC.device)
    inside_RC = (ranks_C < limit_R1) & (mass_before_RC < top_p_R1 * total_R1)
    # A row of numbers that are none keeps nothing: its request fails, and no index may.
    last_R1 = values_RC.gather(-1, (inside_RC.sum(-1, keepdim=True) - 1).clamp(min=0))
    above_RC, equal_RC = scaled_RC > last_R1, scaled_RC == last_R1
    equal_kept_R1 = inside_RC.sum(-1, keepdim=True) - above_RC.sum(-1, keepdim=True)
    keep_RC = above_RC | (equal_RC & (equal_RC.cumsum(-1) <= equal_kept_R1))
    floor_R1 = min_p_R1.to(probs_RC.dtype) * probs_RC.amax(-1, keepdim=True)
    return keep_RC & (probs_RC >= floor_R1)
