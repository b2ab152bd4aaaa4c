"""The slow twin of `dspark.nn.sampling`: one row, plain Python floats, one loop a rule."""

import math
from collections.abc import Sequence

from dspark.core.sampling import SamplingParams


class BorderlineError(Exception):
    """A cut falls so close to a threshold that rounding decides it."""


def plain_probs(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Probabilities one row of logits is sampled from; raises BorderlineError (see above)."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return [float(token == ranked[0]) for token in range(len(logits))]
    best = logits[ranked[0]]
    weights = [math.exp((logit - best) / params.temperature) for logit in logits]

    kept = ranked[: params.top_k] if params.top_k else ranked
    if params.top_p < 1:
        nucleus, mass, total = [], 0.0, math.fsum(weights[token] for token in kept)
        for token in kept:
            _check_clear(mass, params.top_p * total)
            if mass >= params.top_p * total:
                break
            nucleus.append(token)
            mass += weights[token]
        kept = nucleus
    if params.min_p:
        for token in kept:
            _check_clear(weights[token], params.min_p * weights[ranked[0]])
        kept = [token for token in kept if weights[token] >= params.min_p * weights[ranked[0]]]

    total = math.fsum(weights[token] for token in kept)
    return [weights[token] / total if token in set(kept) else 0.0 for token in range(len(logits))]


def _check_clear(value: float, threshold: float) -> None:
    if value != threshold and math.isclose(value, threshold, rel_tol=1e-9):
        raise BorderlineError
