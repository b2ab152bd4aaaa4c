"""Rounds of a head whose miscalibration is known."""

import numpy as np

from dspark.calibration.samples import Rounds

BLOCK = 3


def synthetic(
    count, temperatures=(1.0,) * BLOCK, *, seed=0, prompts=20, shift=0.0, weight=0.0, judged=None
):
    """Rounds whose true conditional acceptance is the sigmoid of a normal logit; the head says that
    logit times its position's temperature, which dividing by the temperature undoes.

    shift: added to the true logit alone, as when other texts are served; so is `weight` times the
    entropy, of which the head knows nothing. judged: [count].
    """
    generator = np.random.default_rng(seed)
    block = len(temperatures)
    owners = np.arange(count) % prompts
    mood = generator.normal(size=(prompts, 1))[owners]
    logits = generator.normal(size=(count, block)) * 1.2 + 0.4 * mood + 0.6
    entropies = np.random.default_rng([seed, 1]).gamma(2.0, 0.7, size=(count, block))
    chances = 1 / (1 + np.exp(-(logits + shift + weight * entropies)))
    kept = generator.random((count, block)) < chances
    accepted = np.cumprod(kept, axis=1).sum(1)
    judged = np.full(count, block) if judged is None else judged
    said = logits * np.array(temperatures)
    return Rounds(said, entropies, np.minimum(accepted, judged), judged, owners)
