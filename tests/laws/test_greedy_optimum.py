"""Law 4: greedy is optimal for a fixed number of tokens, Algorithm 1 where Theta has one peak.

Brute force over every allocation, in exact fractions.
"""

from fractions import Fraction

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.search import (
    algorithm_1,
    greedy_path,
    top_k_admission,
    unconstrained_search,
)
from tests.oracles.scheduling import best_tau, best_theta, tau_of, theta_of
from tests.scheduling.strategies import Case, cases


def theta_reached(case: Case, lengths_R: np.ndarray) -> Fraction:
    return theta_of(case.survival_RK.tolist(), lengths_R, case.sps_at, case.prefill_tokens)


def optimum(case: Case) -> Fraction:
    return best_theta(case.survival_RK.tolist(), case.sps_at, case.prefill_tokens, case.max_admit_R)


def rises_then_stays_below(theta: list[Fraction]) -> bool:
    """Whether Theta rises strictly to a peak and never exceeds it again."""
    peak = 0
    while peak + 1 < len(theta) and theta[peak + 1] > theta[peak]:
        peak += 1
    return all(value <= theta[peak] for value in theta[peak:])


@given(case=cases(), capacity=st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_top_k_is_the_best_use_of_its_tokens(case: Case, capacity: int) -> None:
    rows = case.survival_RK.tolist()
    lengths_R = top_k_admission(case.survival_RK, capacity, max_admit_R=case.max_admit_R)
    assert lengths_R.sum() <= capacity
    assert (lengths_R <= case.max_admit_R).all()
    assert tau_of(rows, lengths_R) == best_tau(rows, capacity, case.max_admit_R)


@given(case=cases())
@settings(max_examples=200, deadline=None)
def test_unconstrained_search_is_the_optimum_on_any_curve(case: Case) -> None:
    lengths_R = unconstrained_search(case.survival_RK, case.sps, **case.options)
    assert theta_reached(case, lengths_R) == optimum(case)


@given(case=cases())
@settings(max_examples=300, deadline=None)
def test_algorithm_1_is_the_optimum_where_theta_has_one_peak(case: Case) -> None:
    path = greedy_path(case.survival_RK, case.max_admit_R)
    one_peak = rises_then_stays_below(path.throughput(case.sps, case.prefill_tokens).tolist())
    event(f"one peak: {one_peak}")
    lengths_R = algorithm_1(case.survival_RK, case.sps, **case.options)
    # Both ways: where Theta comes back above its first peak, stopping there costs something.
    assert (theta_reached(case, lengths_R) == optimum(case)) == one_peak


def test_a_second_peak_is_missed() -> None:
    sps = SpsCurve.from_points([1, 2, 3], [Fraction(1), Fraction(1, 2), Fraction(9, 20)])
    case = Case(
        survival_RK=np.array([[Fraction(4, 5), Fraction(18, 25)]], dtype=object),
        sps=sps,
        prefill_tokens=0,
        max_admit_R=np.array([2]),
    )
    assert theta_reached(case, algorithm_1(case.survival_RK, sps)) == 1
    assert optimum(case) == Fraction(1134, 1000)
