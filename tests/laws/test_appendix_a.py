"""Law 3: the paper's Appendix A, in exact fractions, on the production scheduler.

One request, a block of 2, drafting free of cost. SPS(1, 2, 3) = 1, 1/2, 9/20. The target says
(A, B) = (7/10, 3/10), the draft (1/2, 1/2), so the first token survives with 4/5; A makes the
second confidence 9/10, B makes it 0.
"""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from dspark.scheduling import search
from dspark.scheduling.capacity import lagged_capacity
from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.search import GreedyPath, algorithm_1, greedy_path, unconstrained_search
from dspark.scheduling.survival import survival_probabilities
from tests.oracles.exact_round import APPENDIX_A, APPENDIX_A_RATES, A, B, confidences, round_law

SPS = SpsCurve.from_points([1, 2, 3], APPENDIX_A_RATES)

Search = Callable[[np.ndarray], np.ndarray]


def survival_after(*draft: int) -> np.ndarray:
    return survival_probabilities(np.array([confidences(APPENDIX_A, draft)], dtype=object))


def length_after(search_for: Search, *draft: int) -> int:
    return int(search_for(survival_after(*draft))[0])


def probability_of_a(search_for: Search) -> Fraction:
    law = round_law(
        (APPENDIX_A,),
        lambda tokens: (length_after(search_for, *tokens[0]),),
        block_size=2,
        horizon=1,
    )
    assert sum(law.values()) == 1
    return law[((A,),)]


def early(survival_RK: np.ndarray) -> np.ndarray:
    return algorithm_1(survival_RK, SPS)


def same_step_global(survival_RK: np.ndarray) -> np.ndarray:
    return unconstrained_search(survival_RK, SPS)


def test_survival_and_theta_are_the_papers() -> None:
    assert survival_after(A, B).tolist() == [[Fraction(4, 5), Fraction(18, 25)]]
    assert survival_after(B, B).tolist() == [[Fraction(4, 5), Fraction(0)]]
    theta_after_a = greedy_path(survival_after(A, B)).throughput(SPS, prefill_tokens=0)
    assert theta_after_a.tolist() == [Fraction(1), Fraction(9, 10), Fraction(1134, 1000)]
    # A survival of 0 is not on the path; its Theta is the paper's all the same.
    path_after_b = GreedyPath(np.array([0, 1]), survival_after(B, B)[0], num_requests=1)
    theta_after_b = path_after_b.throughput(SPS, prefill_tokens=0)
    assert theta_after_b.tolist() == [Fraction(1), Fraction(9, 10), Fraction(81, 100)]


def test_same_step_global_search_is_biased() -> None:
    assert length_after(same_step_global, A, A) == 2
    assert length_after(same_step_global, B, A) == 0
    assert probability_of_a(same_step_global) == Fraction(17, 20)


def test_algorithm_1_stops_and_is_exact() -> None:
    assert length_after(early, A, A) == 0
    assert length_after(early, B, A) == 0
    assert probability_of_a(early) == Fraction(7, 10)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_length_that_ignores_the_draft_is_exact(length: int) -> None:
    assert probability_of_a(lambda survival_RK: np.array([length])) == Fraction(7, 10)


def test_mutation_break_deleted_gives_17_20(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "stop_at_first_loss", search.stop_at_best)
    assert probability_of_a(early) == Fraction(17, 20)


def test_mutation_capacity_read_from_the_same_round_gives_17_20() -> None:
    def not_lagged(survival_RK: np.ndarray) -> np.ndarray:
        return search.top_k_admission(survival_RK, lagged_capacity(survival_RK, SPS))

    assert probability_of_a(not_lagged) == Fraction(17, 20)
