"""The vectorised searches against their literal twins, and the edges of the greedy path."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.search import algorithm_1, top_k_admission, unconstrained_search
from dspark.scheduling.survival import survival_probabilities
from tests.oracles.scheduling import paper_algorithm_1
from tests.scheduling.strategies import EXACT_CONFIDENCE, FLOAT_CONFIDENCE, cases

FLAT = SpsCurve.from_points([1, 64], [1.0, 1.0], lookup="floor")


@pytest.mark.parametrize("values", [EXACT_CONFIDENCE, FLOAT_CONFIDENCE], ids=["exact", "float64"])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_searches_equal_the_papers_loop(values: st.SearchStrategy, data: st.DataObject) -> None:
    case = data.draw(cases(values))
    for search, stop in ((algorithm_1, True), (unconstrained_search, False)):
        lengths = search(case.survival_RK, case.sps, **case.options)
        expected = paper_algorithm_1(
            case.survival_RK.tolist(), case.sps_at, case.prefill_tokens, case.max_admit_R, stop=stop
        )
        assert tuple(lengths) == expected


def test_ties_break_by_position_then_request() -> None:
    survival_RK = np.full((3, 2), 0.5)
    assert top_k_admission(survival_RK, 2).tolist() == [1, 1, 0]
    assert top_k_admission(survival_RK, 4).tolist() == [2, 1, 1]


def test_many_ties_among_many_requests() -> None:
    # Large enough for the sort to leave its insertion-sort regime, where it is not stable.
    confidence_RK = np.random.default_rng(5).choice([0.0, 0.5, 0.9, 1.0], size=(300, 7))
    survival_RK = survival_probabilities(confidence_RK)
    positions = [
        (-survival_RK[r, j], j, r) for r in range(300) for j in range(7) if survival_RK[r, j] > 0
    ]
    for capacity in (1, 100, 333, len(positions)):
        expected = np.zeros(300, dtype=int)
        for _, _, request in sorted(positions)[:capacity]:
            expected[request] += 1
        assert top_k_admission(survival_RK, capacity).tolist() == expected.tolist()


def test_survival_of_zero_is_never_admitted() -> None:
    survival_RK = np.array([[0.5, 0.0], [0.0, 0.0]])
    assert top_k_admission(survival_RK, 9).tolist() == [1, 0]
    # Here a larger batch is faster, so that even a token that cannot survive would raise Theta.
    rising = SpsCurve.from_points([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    assert unconstrained_search(survival_RK, rising).tolist() == [1, 0]
    assert algorithm_1(survival_RK, rising).tolist() == [1, 0]


def test_limits_are_kept() -> None:
    survival_RK = np.full((2, 3), 0.9)
    limits_R = np.array([1, 2])
    assert top_k_admission(survival_RK, 9, max_admit_R=limits_R).tolist() == [1, 2]
    assert algorithm_1(survival_RK, FLAT, max_admit_R=limits_R).tolist() == [1, 2]


def test_prefill_tokens_fill_the_batch() -> None:
    cliff = SpsCurve.from_points([1, 5], [1.0, 0.1], lookup="floor")
    survival_RK = np.full((1, 3), 0.9)
    assert algorithm_1(survival_RK, cliff).tolist() == [3]
    assert algorithm_1(survival_RK, cliff, prefill_tokens=2).tolist() == [1]
    assert algorithm_1(survival_RK, cliff, prefill_tokens=3).tolist() == [0]


def test_unconstrained_search_crosses_a_cliff_that_stops_algorithm_1() -> None:
    sps = SpsCurve.from_points([1, 2, 3, 4], [1.0, 0.5, 0.49, 0.48])
    survival_RK = np.full((1, 3), 0.9)
    assert algorithm_1(survival_RK, sps).tolist() == [0]
    assert unconstrained_search(survival_RK, sps).tolist() == [3]


def test_nothing_is_admitted_beyond_the_measured_curve() -> None:
    short = SpsCurve.from_points([1, 2], [1.0, 1.0])
    assert algorithm_1(np.full((1, 3), 0.9), short).tolist() == [1]
    assert unconstrained_search(np.full((4, 3), 0.9), short).tolist() == [0, 0, 0, 0]


def test_a_round_without_requests() -> None:
    nobody = np.zeros((0, 3))
    assert algorithm_1(nobody, FLAT, prefill_tokens=2).tolist() == []
    assert unconstrained_search(nobody, FLAT).tolist() == []
    assert top_k_admission(nobody, 5).tolist() == []


@pytest.mark.parametrize("row", [[0.5, 0.6], [0.5, float("nan")]])
def test_survival_that_rises_is_our_own_mistake(row: list[float]) -> None:
    with pytest.raises(AssertionError, match="survival rises"):
        algorithm_1(np.array([row]), FLAT)
