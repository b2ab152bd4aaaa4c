"""Laws 1 and 2 with entropy as evidence: of the slot's own distribution, so of tokens before it.

The toys' entropies are those of what their slots are drawn from, joined with the head's logit by
the production map. Read one slot too late, an entropy knows the token of the slot it stands for,
and texts are biased.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from dspark.calibration.confidence import Scaling
from dspark.core.sampling import SamplingParams
from dspark.drafters.proposals import entropy
from dspark.scheduling.by_confidence import Async, Early, Marginal
from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.policies import Policy, Threshold
from dspark.scheduling.search import algorithm_1
from tests.laws.harness import Request, distance, run_law, target_law
from tests.laws.policy_runs import PolicyRun
from tests.laws.toys import Text, Toy
from tests.scheduling.models import step_model

LENGTH = 4
SPS = SpsCurve.from_points(range(1, 7), [1.5, 1.4, 1.25, 1.1, 1.0, 0.93])
MODEL = step_model(0.7, 1.0, 1.45, 1.8, 1.9, 2.1, 2.2, 2.5, draft=0.25)
SCALING = Scaling([1.0], [4.0], [-8.0])


@dataclass(frozen=True)
class Uncertain(Toy):
    """A toy whose confidences are calibrated with entropies."""

    late: int = 0
    """The mutation: slots by which the entropy comes too late."""

    def confidence(self, text: Text, drafted: Text) -> float:
        return self._joined(text, drafted, drafted)

    @cache  # noqa: B019
    def survival(self, text: Text, drafted: Text) -> tuple[float, ...]:
        given = [
            self._joined(text, drafted[:slot], drafted[: slot + self.late])
            for slot in range(self.block)
        ]
        return tuple(np.cumprod(given).tolist())

    def _joined(self, text: Text, before: Text, seen: Text) -> float:
        said = Toy.confidence(self, text, before)
        _, logits_C = self.draft_slot(text, seen)
        logit = math.log(said / (1 - said))
        return float(SCALING.confidence([[logit]], [[float(entropy(logits_C))]])[0, 0])


def two_requests(late: int = 0) -> list[Request]:
    sampling = SamplingParams(verification="rejection")
    return [
        Request(Uncertain(vocab=2, block=2, seed=seed, late=late), sampling) for seed in (18, 118)
    ]


LENGTHS: set[int] = set()


def admit(state, drafts):
    survival_RK = np.array([draft.survival for draft in drafts])
    limits = np.array([draft.max_admit for draft in drafts])
    lengths = algorithm_1(survival_RK, SPS, max_admit_R=limits).tolist()
    LENGTHS.update(lengths)
    return lengths, None


def worst(requests: list[Request]) -> float:
    law = run_law(requests, LENGTH, admit)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return distance(law, target_law(requests, LENGTH))


def test_entropy_of_the_slots_own_distribution_leaves_the_law_of_the_texts_alone() -> None:
    LENGTHS.clear()
    assert worst(two_requests()) < 1e-12
    assert {0, 1, 2} == LENGTHS, "admission must have followed the entropies"


def test_mutation_entropy_of_the_slot_after() -> None:
    assert worst(two_requests(late=1)) > 1e-3


POLICIES: dict[str, Policy] = {
    "threshold": Threshold(0.6),
    "early": Early(MODEL),
    "async": Async(MODEL),
    "marginal": Marginal(MODEL),
    "early, gated": Early.gated(MODEL, expected_K=(0.8, 0.5)),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_every_policy_on_such_confidences(policy: Policy) -> None:
    run = PolicyRun(two_requests(), LENGTH)
    law = run.law(policy)
    assert distance(law, target_law(run.requests, LENGTH)) < 1e-12
    assert len(run.seen_lengths) > 1
