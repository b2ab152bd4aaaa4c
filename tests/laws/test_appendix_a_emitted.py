"""Law 3 on everything that serves: noise, draft, search and verification, in exact fractions.

`test_appendix_a` shows the searches; here the production noise and `verify` emit the token. One
request of two tokens A and B: target (7/10, 3/10), draft (1/2, 1/2), block 2.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch

from dspark.core.sampling import SamplingParams
from dspark.nn.noise import RequestNoise, Round, StepNoise
from dspark.nn.sampling import race
from dspark.nn.seams import DraftBlock
from dspark.nn.verification import verify
from dspark.scheduling.capacity import LaggedSurvival, lagged_capacity
from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.search import algorithm_1, top_k_admission, unconstrained_search
from tests.laws.branching import Branching

A, B = 0, 1
BLOCK = 2
SPS = SpsCurve.from_points([1, 2, 3], [1.0, 0.5, 0.45])
DRAFT = torch.tensor([0.5, 0.5], dtype=torch.float64)
TARGET = torch.tensor([0.7, 0.3], dtype=torch.float64)
# Draft and race under DRAFT turn at 1/2, race and last token under TARGET at 7/10, acceptance of B
# at (3/10) / (1/2).
CUTS = [Fraction(1, 2), Fraction(7, 10), Fraction(6, 10)]


def first_token_law(rule, program):
    """The law of the first token that `program` emits, given the request's noise."""
    random = Branching(CUTS)
    params = SamplingParams(verification=rule)
    law = random.law(lambda: program(RequestNoise(random, params, vocab_size=2)))
    assert sum(law.values()) == 1
    return law


def draft(step):
    """A block and its survival: the first token survives with 4/5, the second after A only."""
    ids = torch.tensor([[A, B]])
    tokens = [int(race(DRAFT, step(slot, ids))) for slot in range(BLOCK)]
    block = DraftBlock(
        torch.tensor([tokens]), ids.expand(1, BLOCK, 2), DRAFT.expand(1, BLOCK, 2), None
    )
    return block, np.cumprod([[0.8, 0.9 if tokens[0] == A else 0.0]], axis=1)


def emit(step, block, admitted):
    outcome = verify(
        TARGET.expand(admitted + 1, 2), [admitted], block, step.verification([admitted])
    )
    return int(block.tokens_RK[0, 0]) if outcome.accepted_R[0] else int(outcome.next_token_R[0])


def one_round(search):
    def program(noise):
        step = StepNoise([Round(noise, number=1, index=0)], BLOCK)
        block, survival_RK = draft(step)
        return emit(step, block, int(search(survival_RK)[0]))

    return program


def early(survival_RK):
    return algorithm_1(survival_RK, SPS)


def same_step_global(survival_RK):
    return unconstrained_search(survival_RK, SPS)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_algorithm_1_emits_a_with_7_10(rule):
    assert first_token_law(rule, one_round(early))[A] == Fraction(7, 10)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_fixed_lengths_emit_a_with_7_10(rule, length):
    assert first_token_law(rule, one_round(lambda survival: [length]))[A] == Fraction(7, 10)


def test_global_search_is_biased_under_rejection():
    assert first_token_law("rejection", one_round(same_step_global))[A] == Fraction(17, 20)


def test_global_search_is_exact_under_coupled():
    assert first_token_law("coupled", one_round(same_step_global))[A] == Fraction(7, 10)


def drafted_twice(number_of):
    """A round is drafted and abandoned; its survival decides how much the next one verifies.

    `number_of(round)` is the round number its noise is keyed by.
    """

    def program(noise):
        memory = LaggedSurvival([0.0, 0.0], lag=1)
        abandoned = StepNoise([Round(noise, number=number_of(1), index=0)], BLOCK)
        memory.record([7], draft(abandoned)[1])
        step = StepNoise([Round(noise, number=number_of(2), index=0)], BLOCK)
        capacity = lagged_capacity(memory.before([7]), SPS)
        block, survival_RK = draft(step)
        return emit(step, block, int(top_k_admission(survival_RK, capacity)[0]))

    return program


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_a_position_drafted_again_is_exact(rule):
    law = first_token_law(rule, drafted_twice(lambda number: number))
    assert law[A] == Fraction(7, 10)


def test_mutation_rejection_noise_keyed_by_position():
    """Both rounds draft at position 0: with one key for it, the older capacity knows the draft."""
    law = first_token_law("rejection", drafted_twice(lambda number: 0))
    assert law[A] == Fraction(17, 20)
