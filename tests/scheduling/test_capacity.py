"""Capacity from rounds before."""

from fractions import Fraction

import numpy as np
import pytest

from dspark.scheduling.capacity import LaggedSurvival, lagged_capacity
from dspark.scheduling.cost import SpsCurve

PRIOR = [0.7, 0.4]


def test_survival_comes_from_two_rounds_before() -> None:
    history = LaggedSurvival(PRIOR)
    for step in range(4):
        expected = PRIOR if step < 2 else [0.1 * (step - 2)] * 2
        assert history.before([7]).tolist() == [expected]
        history.record([7], np.full((1, 2), 0.1 * step))


def test_survival_that_old_is_each_requests_own() -> None:
    history = LaggedSurvival(PRIOR, lag=1)
    history.record([7, 8], [[0.9, 0.8], [0.3, 0.2]])
    assert history.before([8, 7]).tolist() == [[0.3, 0.2], [0.9, 0.8]]


def test_a_new_request_starts_from_the_mean_of_every_position() -> None:
    history = LaggedSurvival([Fraction(7, 10), Fraction(4, 10)])
    rows = [[Fraction(9, 10), Fraction(6, 10)], [Fraction(2, 10), Fraction(2, 10)]]
    history.record([7, 8], np.array(rows, dtype=object))
    # A round ago is too new for the mean, too.
    assert history.before([9]).tolist() == [[Fraction(7, 10), Fraction(4, 10)]]
    history.record([], np.zeros((0, 2)))
    # The first expectation counts as one row.
    assert history.before([9]).tolist() == [[Fraction(6, 10), Fraction(4, 10)]]


def test_a_reused_place_in_the_batch_inherits_nothing() -> None:
    history = LaggedSurvival(PRIOR, lag=1)
    history.record([7], [[0.9, 0.9]])
    history.record([8], [[0.1, 0.1]])
    history.record([], np.zeros((0, 2)))
    once_seven, once_eight, new = history.before([7, 8, 9]).tolist()
    assert once_seven == once_eight == new


def test_a_round_without_drafts_passes_time() -> None:
    history = LaggedSurvival(PRIOR)
    history.record([7], [[0.9, 0.8]])
    history.record([], np.zeros((0, 2)))
    assert history.before([7]).tolist() == [[0.9, 0.8]]
    history.record([], np.zeros((0, 2)))
    assert history.before([7]).tolist() != [[0.9, 0.8]]


def test_slots_that_were_not_drafted_are_taken_for_average_ones_and_teach_nothing() -> None:
    history = LaggedSurvival([0.7, 0.4, 0.3], lag=1)
    history.record([7], [[0.9, 0.0, 0.0]], 1)
    assert history.before([7]).tolist() == [[0.9, 0.4, 0.3]]
    assert history.before([8])[0] == pytest.approx([0.8, 0.4, 0.3])
    history.record([7], [[0.35, 0.2, 0.0]], 2)
    assert history.before([7])[0] == pytest.approx([0.35, 0.2, 0.2]), "survival never rises"
    for _ in range(30):
        history.record([7], [[0.1, 0.0, 0.0]], 1)
    new = history.before([8])[0]
    assert new[0] < 0.2 and (np.diff(new) <= 0).all()
    for _ in range(30):
        history.record([7], [[0.9, 0.0, 0.0]], 1)
    assert history.before([8])[0, 1:] == pytest.approx([1 / 3, 0.3])


def test_what_is_recorded_cannot_be_changed_later() -> None:
    history = LaggedSurvival(PRIOR, lag=1)
    survival_RK = np.array([[0.9, 0.8]])
    history.record([7], survival_RK)
    survival_RK[:] = 0.0
    assert history.before([7]).tolist() == [[0.9, 0.8]]


def test_no_requests() -> None:
    assert LaggedSurvival(PRIOR).before([]).shape == (0, 2)


def test_a_lag_of_zero_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="lag is 0"):
        LaggedSurvival(PRIOR, lag=0)


def test_capacity_is_the_best_count_of_the_older_survival() -> None:
    sps = SpsCurve.from_points([1, 2, 3, 4, 5, 6], [1.0, 0.9, 0.9, 0.9, 0.3, 0.3])
    survival_RK = np.array([[0.9, 0.8], [0.7, 0.1]])
    assert lagged_capacity(survival_RK, sps) == 2
    assert lagged_capacity(survival_RK, sps, prefill_tokens=1) == 1
    assert lagged_capacity(survival_RK, sps, max_admit_R=np.array([0, 1])) == 1
