"""From measured steps to a `CostModel`.

Counts of tokens and of requests get a free value each, so a cliff of the machine stays a cliff;
isotonic regression then takes out what only noise can explain: a larger batch that is faster. The
least squares weigh every cell by its own size, so that small steps count as much as large ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.core.errors import ConfigError
from dspark.scheduling.arrays import FloatArray, IntArray
from dspark.scheduling.cost_model import CostModel, Curve, PartCost

_TAIL_POINTS = 4
"""The slope beyond the largest measured size is that over so many sizes before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCell:
    """The median of one shape of step, without its draft."""

    batch_tokens: int
    requests: int
    context_length: int
    """Cached tokens of each request."""
    forward: float
    """Seconds of the target's forward."""
    rest: float
    """Seconds of sampling, scheduling, commit and context capture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCell:
    """The median of one shape of draft: all of `requests` draft."""

    requests: int
    length: int
    """Slots drafted for each."""
    context_length: int
    seconds: float
    """Backbone and sequential head."""


@dataclass(frozen=True, slots=True)
class Fit:
    model: CostModel
    worst_error: float
    """Largest relative error of a measured step (forward and rest together) under the model."""


def fit_cost(steps: Sequence[StepCell], drafts: Sequence[DraftCell]) -> Fit:
    """The cost model of these medians.

    Raises ConfigError where the cells cannot tell the axes apart: fewer than two batch sizes, or
    groups of cells that share neither a batch size nor a count of requests.
    """
    tokens = np.array([cell.batch_tokens for cell in steps])
    requests = np.array([cell.requests for cell in steps])
    context = np.array([cell.context_length for cell in steps], dtype=np.float64)
    if len(np.unique(tokens)) < 2:
        raise ConfigError(
            f"the profile has {len(np.unique(tokens))} batch size(s); it needs at least 2"
        )
    if not drafts:
        raise ConfigError("the profile has no draft; profile again with a drafter")
    forward_seconds = np.array([cell.forward for cell in steps])
    forward = _fit_part(tokens, requests, context, forward_seconds, by_context=2)
    rest_seconds = np.array([cell.rest for cell in steps])
    rest = _fit_part(tokens, requests, context, rest_seconds, by_context=0)
    drafting = np.array([cell.requests for cell in drafts])
    lengths = np.array([cell.length for cell in drafts])
    measured = tuple(np.unique(lengths).tolist())
    draft = _fit_part(
        drafting * lengths if len(measured) > 1 else np.zeros_like(drafting),
        drafting,
        np.array([cell.context_length for cell in drafts], dtype=np.float64),
        np.array([cell.seconds for cell in drafts]),
        by_context=1,
        between=_lines,
    )
    model = CostModel(forward, rest, draft, measured)
    errors = [
        abs(float(model.step_seconds(b, requests=r, context_tokens=r * c)) / (f + e) - 1)
        for b, r, c, f, e in zip(
            tokens, requests.tolist(), context, forward_seconds, rest_seconds, strict=True
        )
    ]
    return Fit(model, max(errors))


def isotonic(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The never falling sequence nearest to `values` in weighted least squares (pool adjacent
    violators). A rising sequence comes back as it is."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            above, heavy, count = blocks.pop()
            total = heavy + block[1]
            block = ((above * heavy + block[0] * block[1]) / total, total, count + block[2])
        blocks.append(block)
    return np.repeat([value for value, _, _ in blocks], [count for _, _, count in blocks])


def _fit_part(
    tokens: IntArray,
    requests: IntArray,
    context: FloatArray,
    seconds: FloatArray,
    *,
    by_context: int,
    between: Callable[[IntArray, FloatArray], Curve] | None = None,
) -> PartCost:
    """Free values by tokens and requests (the fewest requests cost 0), slopes by context.

    by_context: 1, a slope by cached tokens; 2, one by pairs of a query and a cached token, too.
    between: the curve through values by tokens; `_steps` by default."""
    token_sizes, token_of = np.unique(tokens, return_inverse=True)
    request_sizes, request_of = np.unique(requests, return_inverse=True)
    grouped = len(token_sizes) > 1
    free = [
        np.eye(len(token_sizes))[token_of],
        np.eye(len(request_sizes))[request_of][:, 1 if grouped else 0 :],
    ]
    columns = np.concatenate(free if grouped else free[1:], axis=1)
    if np.linalg.matrix_rank(columns) < columns.shape[1]:
        raise ConfigError(
            "the profile's batch sizes and request counts fall into groups that share neither; "
            "measure every request count with several batch sizes"
        )
    slopes = np.stack([requests * context, tokens * context], axis=1)
    slopes = slopes[:, : min(by_context, 2 if grouped else 1)]
    if len(np.unique(context)) < 2:
        slopes = slopes[:, :0]
    weights = 1.0 / seconds
    kept = list(range(slopes.shape[1]))
    while True:
        design = np.concatenate([columns, slopes[:, kept]], axis=1) * weights[:, None]
        solution = np.linalg.lstsq(design, seconds * weights, rcond=None)[0]
        found: FloatArray = solution.astype(np.float64)
        coefficients = dict(zip(kept, found[columns.shape[1] :].tolist(), strict=True))
        negative = [index for index, value in coefficients.items() if value < 0]
        if not negative:
            break
        kept.remove(min(negative, key=lambda index: coefficients[index]))
    count = len(token_sizes) if grouped else 0
    by_token = isotonic(found[:count], _mass(token_of, weights, count))
    by_request = found[count : columns.shape[1]]
    if grouped:
        by_request = np.concatenate(([0.0], by_request))
    by_request = isotonic(by_request, _mass(request_of, weights, len(request_sizes)))
    return PartCost(
        tokens=(between or _steps)(token_sizes, by_token) if grouped else _ZERO,
        requests=_lines(request_sizes, np.maximum(by_request, 0.0)),
        per_context=coefficients.get(0, 0.0),
        per_pair=coefficients.get(1, 0.0),
    )


_ZERO = Curve(np.zeros(1), 0.0)


def _mass(group_of: IntArray, weights: FloatArray, count: int) -> FloatArray:
    mass = np.bincount(group_of, weights=weights**2, minlength=count)[:count]
    return mass.astype(np.float64)


def _steps(sizes: IntArray, seconds: FloatArray) -> Curve:
    """A size between two measured ones costs what the larger one does: kernels work in tiles."""
    dense = np.maximum(seconds, 0.0)[np.searchsorted(sizes, np.arange(sizes[-1] + 1))]
    return Curve(dense, _tail(sizes, seconds))


def _lines(sizes: IntArray, seconds: FloatArray) -> Curve:
    return Curve(np.interp(np.arange(sizes[-1] + 1), sizes, seconds), _tail(sizes, seconds))


def _tail(sizes: IntArray, seconds: FloatArray) -> float:
    if len(sizes) < 2:
        return 0.0
    first = max(0, len(sizes) - _TAIL_POINTS)
    return max(0.0, float((seconds[-1] - seconds[first]) / (sizes[-1] - sizes[first])))
