"""Law 1 with recalibration: confidences that follow outcomes leave the law of the texts alone.

The state of the rule is every finished round; scalings come from `OnlineCalibration` itself,
with a window of two rounds so that it refits within a text.
"""

from functools import cache

import numpy as np
import pytest

from dspark.calibration.condition import CandidateSet
from dspark.calibration.confidence import Scaling
from dspark.calibration.online import OnlineCalibration, OnlineConfig
from dspark.core.records import RoundRecord, StepRecord
from dspark.core.sampling import SamplingParams
from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.search import algorithm_1
from tests.laws.harness import Request, distance, run_law, target_law
from tests.laws.toys import Toy

LENGTH, BLOCK = 4, 2
SAMPLING = SamplingParams()
SPS = SpsCurve.from_points(range(1, 7), [1.5, 1.1, 0.85, 0.7, 0.6, 0.52])
CONFIG = OnlineConfig(
    window=1, every=1, margin=-1.0, step=3.0, reach=9.0, offset_step=2.0, offset_reach=4.0, least=1
)
"""Margin -1: every round with a verified position is taken for drift."""
REQUESTS = [Request(Toy(vocab=2, block=BLOCK, seed=seed), SAMPLING) for seed in (18, 118)]


def logits(draft):
    conditional = np.diff(np.log(np.maximum(draft.survival, 1e-9)), prepend=0.0)
    chance = np.clip(np.exp(conditional), 1e-6, 1 - 1e-6)
    return tuple(np.log(chance / (1 - chance)).tolist())


@cache
def scaling(finished):
    """After these rounds (logits, admitted, accepted), in order."""
    calibration = OnlineCalibration({}, CandidateSet(2, 2), BLOCK, config=CONFIG)
    calibration.expect(SAMPLING)
    for own, admitted, accepted in finished:
        record = RoundRecord(
            request=0, round=1, proposed=BLOCK, admitted=admitted, accepted=accepted,
            emitted=accepted + 1, ended=False, confidence=own, entropy=(0.0,) * BLOCK,
        )  # fmt: skip
        step = StepRecord(step=0, batch_tokens=1, prefill_tokens=0, rounds=(record,))
        calibration.observe(step, {0: SAMPLING})
    known = calibration.snapshot().scalings
    return next(iter(known.values())) if known else Scaling.identity(BLOCK)


USED = set()


def admit(finished, drafts):
    own = scaling(finished)
    USED.add((*own.temperatures, *own.offsets))
    entropies_RK = np.zeros((len(drafts), BLOCK))
    confidence_RK = own.confidence([logits(draft) for draft in drafts], entropies_RK)
    limits = np.array([draft.max_admit for draft in drafts])
    return algorithm_1(np.cumprod(confidence_RK, axis=1), SPS, max_admit_R=limits).tolist()


def outcomes(state, drafts):
    """The finished rounds, now that their outcomes show in the texts; the last two are kept."""
    finished, pending = state or ((), ())
    texts = {draft.request: draft.text for draft in drafts}
    for request, text, own, admitted in pending:
        if request in texts:
            finished = (*finished, (own, admitted, len(texts[request]) - len(text) - 1))
    return finished[-2:]


def recalibrated(state, drafts):
    finished = outcomes(state, drafts)
    lengths = admit(finished, drafts)
    pending = tuple(
        (draft.request, draft.text, logits(draft), length)
        for draft, length in zip(drafts, lengths, strict=True)
    )
    return lengths, (finished, pending)


def anticipating(state, drafts):
    """The mutation: the round that is decided is looked at first, as if its own drafts told how it
    ends."""
    finished = outcomes(state, drafts)
    peeked = tuple((logits(d), BLOCK, BLOCK if d.tokens[0] == 0 else 0) for d in drafts)
    return admit((*finished, *peeked)[-2:], drafts), None


def worst(admission):
    law = run_law(REQUESTS, LENGTH, admission)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return distance(law, target_law(REQUESTS, LENGTH))


def test_recalibration_leaves_the_law_of_the_texts_alone():
    USED.clear()
    assert worst(recalibrated) < 1e-12
    assert len(USED) > 2, "scalings must have followed the outcomes"


def test_mutation_recalibrating_on_the_round_that_is_decided():
    assert worst(anticipating) > 1e-3
