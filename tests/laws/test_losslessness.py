"""Law 1 under `rejection`: two requests jointly, prefill and up to three rounds, exactly."""

from functools import cache

import numpy as np
import pytest

from dspark.core.sampling import SamplingParams
from dspark.scheduling.capacity import LaggedSurvival, lagged_capacity
from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.search import algorithm_1, top_k_admission, unconstrained_search
from tests.laws.harness import Drafted, Request, distance, run_law, target_law
from tests.laws.toys import Toy

LENGTH = 4
EXACT = 1e-12

# Jagged, as measured curves are: Theta has more than one peak.
SPS = SpsCurve.from_points(range(1, 9), [1.5, 1.0, 0.69, 0.55, 0.52, 0.48, 0.45, 0.4])


def fixed(count):
    def admit(state, drafts):
        return [min(count, draft.max_admit) for draft in drafts], None

    return admit


def survival(drafts):
    return np.array([draft.survival for draft in drafts])


def limits(drafts):
    return np.array([draft.max_admit for draft in drafts])


def early_stop(state, drafts):
    return algorithm_1(survival(drafts), SPS, max_admit_R=limits(drafts)).tolist(), None


def same_step_global(state, drafts):
    return unconstrained_search(survival(drafts), SPS, max_admit_R=limits(drafts)).tolist(), None


def lagged(lag):
    """Top-K with a capacity from the survival of earlier rounds, the state of the scheduler."""

    @cache  # functions of their arguments, which come back behind many a history
    def capacity(block, state, requests, most):
        memory = LaggedSurvival([0.9] * block, lag=lag)
        for before, survival_RK in state or ():
            memory.record(before, survival_RK)
        return lagged_capacity(memory.before(requests), SPS, max_admit_R=np.array(most))

    @cache
    def lengths(survival_RK, tokens, most):
        return top_k_admission(np.array(survival_RK), tokens, max_admit_R=np.array(most)).tolist()

    def admit(state, drafts):
        requests = tuple(draft.request for draft in drafts)
        most = tuple(draft.max_admit for draft in drafts)
        survival_RK = tuple(draft.survival for draft in drafts)
        tokens = capacity(drafts[0].toy.block, state, requests, most)
        this_round = (requests, survival_RK)
        return lengths(survival_RK, tokens, most), ((*(state or ()), this_round)[-lag:])

    return admit


POLICIES = {
    "off": fixed(0),
    "fixed:1": fixed(1),
    "fixed:3": fixed(3),
    "early": early_stop,
    "lagged:1": lagged(1),
    "lagged:2": lagged(2),
}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "top-k": {"top_k": 2},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "min-p": {"min_p": 0.3},
}
OTHER = SamplingParams(temperature=1.0)
"""The second request of every batch."""

SEEDS = (18, 118)
"""Toys on which what a draft token says about the slots after it matters: see the biased search."""


def worst(requests, policy):
    """How far the law of the emitted texts is from the target's."""
    emitted = run_law(requests, LENGTH, policy)
    assert sum(emitted.values()) == pytest.approx(1.0, abs=EXACT)
    return distance(emitted, target_law(requests, LENGTH))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_two_tokens_blocks_of_three(policy, sampling):
    first = Request(Toy(vocab=2, block=3, seed=SEEDS[0]), SamplingParams(**sampling))
    second = Request(Toy(vocab=2, block=3, seed=SEEDS[1]), OTHER)
    assert worst((first, second), policy) < EXACT


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("sampling", ["greedy", "top-p"])
def test_three_tokens_two_of_them_candidates(policy, sampling):
    first = Request(Toy(vocab=3, block=2, seed=3, candidates=2), OTHER)
    second = Request(Toy(vocab=3, block=2, seed=4), SamplingParams(**SAMPLING[sampling]))
    assert worst((first, second), policy) < EXACT


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_four_tokens_alone_with_everything_on(policy):
    params = SamplingParams(temperature=1.5, top_k=3, top_p=0.95, min_p=0.05)
    request = Request(Toy(vocab=4, block=3, seed=5), params)
    assert worst((request,), policy) < EXACT


def test_a_biased_search_is_seen():
    """The harness can fail: a same-step global search reads the tokens that it decides about."""
    requests = [Request(Toy(vocab=2, block=3, seed=seed), OTHER) for seed in SEEDS]
    assert worst(requests, same_step_global) > 1e-2


class TestGrammar:
    """A token the grammar forbids is offered and rejected, or never drafted; never dropped."""

    params = SamplingParams()

    def test_offered_and_rejected(self):
        request = Request(Toy(vocab=3, block=2, seed=6, forbid=True), self.params)
        assert worst((request,), fixed(2)) < EXACT

    def test_never_drafted(self):
        toy = Toy(vocab=3, block=2, seed=6, forbid=True, forbid_draft=True)
        assert worst((Request(toy, self.params),), fixed(2)) < EXACT

    def test_mutation_dropped(self):
        def cut(state, drafts: tuple[Drafted, ...]):
            return [min(legal_length(draft), draft.max_admit) for draft in drafts], None

        def legal_length(draft):
            for slot, token in enumerate(draft.tokens):
                if token == draft.toy.forbidden(draft.text + draft.tokens[:slot]):
                    return slot
            return len(draft.tokens)

        request = Request(Toy(vocab=3, block=2, seed=6, forbid=True), self.params)
        assert worst((request,), cut) > 1e-2
