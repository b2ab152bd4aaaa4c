"""Policies that weigh survival against cost: what each reads, and that states stay apart."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.records import RoundRecord, StepRecord
from dspark.scheduling.by_confidence import Async, Early, Global, Marginal, hull_slopes
from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.cost_model import CurveCost
from dspark.scheduling.policies import RoundView
from dspark.scheduling.search import algorithm_1, unconstrained_search
from tests.scheduling.models import linear_model, step_model


def view_of(survival: list[list[float]], requests: tuple[int, ...] | None = None, **changes):
    survival_RK = np.array(survival)
    count, block = survival_RK.shape
    view = RoundView(
        step=0,
        requests=requests or tuple(range(count)),
        rounds=(1,) * count,
        block_size=block,
        prefill_tokens=0,
        max_admit_R=np.full(count, block),
        context_R=np.full(count, 10),
        survival_RK=survival_RK,
    )
    return replace(view, **changes)


def before(view: RoundView) -> RoundView:
    return replace(view, survival_RK=None)


CLIFF = SpsCurve.from_points([1, 2, 3, 4], [1.0, 0.5, 0.49, 0.48])


def test_early_stops_at_the_cliff_and_global_crosses_it() -> None:
    view = view_of([[0.9, 0.8, 0.7]])
    assert Early(CurveCost(CLIFF)).admit(view).tolist() == [0]
    assert Global(CurveCost(CLIFF)).admit(view).tolist() == [3]


def test_theta_of_the_whole_step_and_of_the_forward_alone_differ() -> None:
    # The forward doubles with a second row; beside a draft block of 10 seconds that is nothing.
    model = step_model(1.0, 2.0, 3.0, draft=10.0)
    view = view_of([[0.8, 0.7]])
    assert Early.gated(model).name == "early"
    assert Early(model).admit(view).tolist() == [2]
    paper = Early.gated(model, forward_only=True)
    assert paper.name == "early:forward"
    assert Early(paper.cost).admit(view).tolist() == [0]


def test_prompt_tokens_and_context_are_in_the_price() -> None:
    model = step_model(*[1.0] * 6, *[9.0] * 20)
    view = view_of([[0.9, 0.9, 0.9, 0.9]])
    assert Early(model).admit(view).tolist() == [4]
    assert Early(model).admit(replace(view, prefill_tokens=3)).tolist() == [2]
    dear = replace(model, forward=replace(model.forward, per_pair=1e-3))
    assert Early(dear).admit(view).tolist() == [4]
    assert Early(dear).admit(replace(view, context_R=np.array([9000]))).tolist() == [0]


def test_async_decides_how_many_from_two_rounds_before() -> None:
    policy = Async(linear_model(fixed=1.0, row=0.5, draft=0.0))
    sure, unsure = [[1.0, 1.0, 1.0]], [[0.05, 0.04, 0.03]]
    history = [sure, sure, unsure, unsure, sure, sure, sure]
    found = [policy.admit(view_of(survival)).tolist() for survival in history]
    # Rounds 2 and 3 look at `sure`, 4 and 5 at `unsure`, 6 at `sure` again.
    assert [found[t] for t in (2, 3, 4, 5, 6)] == [[3], [3], [0], [0], [3]]


def test_async_expects_of_slots_that_were_not_drafted_what_they_bring_on_average() -> None:
    policy = Async(linear_model(fixed=1.0, row=0.2, draft=0.0), expected_K=[0.9, 0.8])
    short = view_of([[0.9, 0.0]], draft_length=1, max_admit_R=np.array([1]))
    for _ in range(9):
        assert policy.admit(short).tolist() == [1]
    assert policy.admit(view_of([[0.9, 0.8]], draft_length=2)).tolist() == [2]


def test_async_fills_its_rows_with_the_best_of_now() -> None:
    policy = Async(linear_model(fixed=1.0, row=0.5, draft=0.0))
    first = [[1.0, 1.0], [0.05, 0.04]]
    for _ in range(2):
        policy.admit(view_of(first))
    assert policy.admit(view_of([[0.1, 0.1], [0.9, 0.8]])).tolist() == [0, 2]


def test_async_takes_a_new_request_for_an_average_one() -> None:
    policy = Async(linear_model(fixed=1.0, row=0.5, draft=0.0))
    for _ in range(9):
        policy.admit(view_of([[0.05, 0.04]], requests=(7,)))
    assert policy.admit(view_of([[1.0, 1.0]], requests=(8,))).tolist() == [0]
    other = policy.fresh()
    # On its first day it expects survival of 0.7 and 0.49, and two rows pay.
    assert other.admit(view_of([[1.0, 1.0]], requests=(8,))).tolist() == [2]


def test_marginal_compares_with_what_a_second_brings() -> None:
    policy = Marginal(linear_model(fixed=1.0, row=0.5, draft=0.0))
    # Plain decoding makes 1 token in 1.5 s: a row of 0.5 s is worth a third of a token.
    assert policy.admit(view_of([[0.9, 0.34, 0.33]])).tolist() == [2]
    policy.throughput.speedup = 2.0
    assert policy.admit(view_of([[0.9, 0.67, 0.66]])).tolist() == [2]


def test_marginal_spreads_a_cliff_over_the_rows_it_admits() -> None:
    # One second up to 2 tokens, two from 3 to 6: crossing costs 1 s and admits up to 4 rows.
    model = step_model(1.0, 1.0, 2.0, 2.0, 2.0, 2.0)
    assert hull_slopes(np.array([1.0, 1.0, 2.0, 2.0, 2.0, 2.0])).tolist() == [0, *[0.25] * 4]
    policy = Marginal(model)
    assert policy.admit(view_of([[0.9, 0.8, 0.7, 0.6, 0.5]])).tolist() == [5]
    assert policy.admit(view_of([[0.9, 0.2, 0.2, 0.2, 0.2]])).tolist() == [1]


@given(st.lists(st.integers(0, 20), min_size=2, max_size=9))
@settings(max_examples=200)
def test_hull_slopes_are_those_of_the_largest_convex_function_below(values: list[int]) -> None:
    cost = np.array(values, dtype=np.float64)
    slopes = hull_slopes(cost)
    hull = np.concatenate(([cost[0]], cost[0] + np.cumsum(slopes)))
    assert (np.diff(slopes) >= -1e-9).all()
    assert (hull <= cost + 1e-9).all()
    # Largest: every point of it lies on a chord between two values.
    for k, value in enumerate(hull):
        chords = [
            cost[i] + (cost[j] - cost[i]) * (k - i) / (j - i) if j > i else cost[i]
            for i in range(k + 1)
            for j in range(k, len(cost))
        ]
        assert value == pytest.approx(min(chords), abs=1e-9)


def test_throughput_is_of_the_load_of_now() -> None:
    policy = Marginal(linear_model(fixed=1.0, row=0.1, draft=0.0))
    few, many = view_of([[0.9]]), view_of([[0.9]] * 4)
    assert policy.throughput.rate(few) == pytest.approx(1 / 1.1)
    assert policy.throughput.rate(many) == pytest.approx(4 / 1.4)
    for step in range(300):
        policy.admit(few)
        record = RoundRecord(
            request=0, round=step, proposed=1, admitted=1, accepted=1, emitted=2, ended=False
        )
        policy.observe(StepRecord(step=step, batch_tokens=2, prefill_tokens=0, rounds=(record,)))
    assert policy.throughput.rate(few) == pytest.approx(2 / 1.21, rel=1e-4)


@pytest.mark.parametrize("policy", [Early, Async, Marginal, Global])
def test_a_round_without_a_draft_or_without_requests(policy) -> None:
    own = policy(linear_model())
    view = view_of([[0.5, 0.4]])
    assert own.wants_draft(before(view)).tolist() == [True]
    assert own.admit(before(view)).tolist() == [0]
    empty = view_of([[0.5]], max_admit_R=np.array([0]))
    assert own.fresh().admit(empty).tolist() == [0]
    nobody = replace(
        view, requests=(), rounds=(), max_admit_R=np.zeros(0, int), context_R=np.zeros(0, int),
        survival_RK=None,
    )  # fmt: skip
    assert own.wants_draft(nobody).tolist() == own.admit(nobody).tolist() == []


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_early_and_global_are_the_searches_on_the_rounds_curve(data: st.DataObject) -> None:
    confidence = st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0])
    rows = data.draw(st.lists(st.lists(confidence, min_size=3, max_size=3), min_size=1, max_size=3))
    times = data.draw(st.lists(st.sampled_from([1.0, 1.1, 2.0, 3.0]), min_size=16, max_size=16))
    model = step_model(*np.sort(times))
    view = view_of(np.cumprod(rows, axis=1).tolist(), prefill_tokens=data.draw(st.integers(0, 3)))
    sps = model.round_sps(
        requests=len(rows), drafting=len(rows), length=3, context_tokens=10.0 * len(rows)
    )
    options = {"prefill_tokens": view.prefill_tokens, "max_admit_R": view.max_admit_R}
    assert (
        Early(model).admit(view).tolist() == algorithm_1(view.survival_RK, sps, **options).tolist()
    )
    assert (
        Global(model).admit(view).tolist()
        == unconstrained_search(view.survival_RK, sps, **options).tolist()
    )
