"""Intervals by resampling prompts, the unit that is independent: rounds of one text are not."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    seed: int,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of sum(numerators) / sum(denominators), one entry a prompt.

    For accepted lengths: emitted tokens and rounds of every prompt, its samples added up. Prompts
    without a round (denominator 0) say nothing and are left out. None with fewer than two prompts:
    one prompt cannot say how much prompts differ.
    """
    pairs = np.array(
        [(n, d) for n, d in zip(numerators, denominators, strict=True) if d > 0], dtype=np.float64
    )
    if len(pairs) < 2:
        return None
    generator = np.random.default_rng(seed)
    picks = generator.integers(len(pairs), size=(resamples, len(pairs)))
    sums = pairs[picks].sum(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [tail, 1 - tail])
    return float(low), float(high)
