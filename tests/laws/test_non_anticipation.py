"""Law 2: whether a draft position is verified depends on nothing that is drawn at or after it.

Three statements of it, on the production scheduler: changing later confidences changes no
admission; a referee who sees only admitted tokens can play every round (`is_sequential`); and the
joint law of what two requests emit is the target's, in exact fractions. Anticipating rules fail.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.scheduling import search
from dspark.scheduling.capacity import LaggedSurvival, lagged_capacity
from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.search import algorithm_1, top_k_admission, unconstrained_search
from dspark.scheduling.survival import survival_probabilities
from tests.oracles.exact_round import (
    APPENDIX_A,
    APPENDIX_A_RATES,
    A,
    B,
    Prefix,
    ToyRequest,
    completed,
    confidences,
    emitted,
    round_law,
    target_law,
)
from tests.oracles.scheduling import Lengths, Tokens, is_sequential
from tests.scheduling.strategies import (
    EXACT_CONFIDENCE,
    FLOAT_CONFIDENCE,
    Case,
    cases,
    jagged_rates,
    smooth_rates,
)

Search = Callable[[np.ndarray], np.ndarray]
CLIFF = SpsCurve.from_points([1, 2, 3], APPENDIX_A_RATES)


def survival_of(requests: tuple[ToyRequest, ...], tokens: Tokens) -> np.ndarray:
    rows = [confidences(request, draft) for request, draft in zip(requests, tokens, strict=True)]
    return survival_probabilities(np.array(rows, dtype=object))


# Changing what comes later.


@st.composite
def redrawn_tails(draw: st.DrawFn, values: st.SearchStrategy) -> tuple[Case, np.ndarray, int, int]:
    """A case, its survival with request r's confidences after position k redrawn, r and k.

    Tokens at positions >= k (1-based) feed just those: the confidence at k reads the token before.
    """
    case = draw(cases(values))
    requests, block = case.survival_RK.shape
    request, position = draw(st.integers(0, requests - 1)), draw(st.integers(1, block))
    tail = draw(st.lists(values, min_size=block - position, max_size=block - position))
    other = case.survival_RK.copy()
    for column, confidence in enumerate(tail, start=position):
        other[request, column] = other[request, column - 1] * confidence
    return case, other, request, position


def anticipates(admit: Search, drawn: tuple[Case, np.ndarray, int, int]) -> bool:
    case, other_RK, request, position = drawn
    before = min(admit(case.survival_RK)[request], position)
    return bool(before != min(admit(other_RK)[request], position))


def scheduler(name: str, case: Case, capacity: int) -> Search:
    return {
        "algorithm_1": lambda a: algorithm_1(a, case.sps, **case.options),
        "top_k": lambda a: top_k_admission(a, capacity, max_admit_R=case.max_admit_R),
        "global": lambda a: unconstrained_search(a, case.sps, **case.options),
    }[name]


@pytest.mark.parametrize("values", [EXACT_CONFIDENCE, FLOAT_CONFIDENCE], ids=["exact", "float64"])
@pytest.mark.parametrize("name", ["algorithm_1", "top_k"])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_later_confidences_change_no_admission(
    name: str, values: st.SearchStrategy, data: st.DataObject
) -> None:
    drawn = data.draw(redrawn_tails(values))
    capacity = data.draw(st.integers(0, 9))
    assert not anticipates(scheduler(name, drawn[0], capacity), drawn)


def test_mutation_same_round_global_search_anticipates() -> None:
    after_a, after_b = (survival_of((APPENDIX_A,), ((first, A),)) for first in (A, B))
    case = Case(after_a, CLIFF, prefill_tokens=0, max_admit_R=np.array([2]))
    drawn = (case, after_b, 0, 1)
    assert anticipates(scheduler("global", case, 0), drawn)
    assert not anticipates(scheduler("algorithm_1", case, 0), drawn)


def test_mutation_ties_that_put_the_deeper_position_first_anticipate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Both requests are as likely to get their first token accepted; one token can be verified.
    rounds = [survival_probabilities([[0.5, certainty], [0.5, 0.0]]) for certainty in (1.0, 0.0)]

    def lengths() -> list[list[int]]:
        return [top_k_admission(survival_RK, 1).tolist() for survival_RK in rounds]

    assert lengths() == [[1, 0], [1, 0]]
    monkeypatch.setattr(
        search, "_descending", lambda values: np.argsort(values, kind="stable")[::-1]
    )
    assert lengths() == [[1, 0], [0, 1]]


# The capacity of a round, decided two rounds before.


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_lagged_capacity_reads_nothing_of_this_round_or_the_one_before(data: st.DataObject) -> None:
    count, block, steps = 2, 2, 5
    rows = st.lists(EXACT_CONFIDENCE, min_size=block, max_size=block)
    confidence = st.lists(rows, min_size=count, max_size=count)
    rates = data.draw(jagged_rates(7) | smooth_rates(7))
    sps = SpsCurve.from_points(range(1, len(rates) + 1), rates)
    history = data.draw(st.lists(confidence, min_size=steps, max_size=steps))
    changed_from = data.draw(st.integers(0, steps - 1))
    redrawn = data.draw(
        st.lists(confidence, min_size=steps - changed_from, max_size=steps - changed_from)
    )

    def capacities(rounds: list) -> list[int]:
        lagged = LaggedSurvival([Fraction(1, 2), Fraction(1, 4)])
        found = []
        for confidence_RK in rounds:
            found.append(lagged_capacity(lagged.before([4, 9]), sps))
            survival_RK = survival_probabilities(np.array(confidence_RK, dtype=object))
            lagged.record([4, 9], survival_RK)
        return found

    same = changed_from + 2
    other = capacities([*history[:changed_from], *redrawn])
    assert capacities(history)[:same] == other[:same]


def test_mutation_drafting_the_same_tokens_again_after_capacity_has_seen_them() -> None:
    def probability_of_a(redraft: Callable[[Prefix], list[Prefix]]) -> Fraction:
        """Two rounds are drafted and abandoned; the third is verified with the capacity of the
        first."""
        total = Fraction(0)
        drafts = list(product((A, B), repeat=2))
        for first in drafts:
            lagged = LaggedSurvival([Fraction(0), Fraction(0)])
            for abandoned in (first, (A, A)):
                lagged.record([7], survival_of((APPENDIX_A,), (abandoned,)))
            capacity = lagged_capacity(lagged.before([7]), CLIFF)
            for third in redraft(first):
                length = int(top_k_admission(survival_of((APPENDIX_A,), (third,)), capacity)[0])
                law = completed(APPENDIX_A, emitted(APPENDIX_A, third, length), horizon=1)
                total += law[(A,)] / len(drafts) / len(redraft(first))
        return total

    # `rejection` noise keyed by position would make the third draft the first one again.
    assert probability_of_a(lambda first: [first]) == Fraction(17, 20)
    assert probability_of_a(lambda first: list(product((A, B), repeat=2))) == Fraction(7, 10)


# The referee, over whole trees of confidences.


@st.composite
def toy_requests(draw: st.DrawFn) -> ToyRequest:
    """Two tokens, a block of 2: any target, any draft, any confidence after each prefix."""
    share = st.sampled_from([Fraction(k, 4) for k in (1, 2, 3)])
    certain = st.sampled_from([Fraction(k, 4) for k in (0, 1, 2, 4)])
    prefixes = [(), (0,), (1,), *product((0, 1), repeat=2)]
    target = {prefix: draw(certain) for prefix in prefixes}
    draft = {prefix: draw(share) for prefix in prefixes}
    confidence = {prefix: draw(EXACT_CONFIDENCE) for prefix in prefixes[:3]}
    return ToyRequest(
        target_probs=lambda prefix: (target[prefix], 1 - target[prefix]),
        draft_probs=lambda prefix: (draft[prefix], 1 - draft[prefix]),
        confidence=confidence.__getitem__,
    )


@st.composite
def lossless_rounds(
    draw: st.DrawFn,
) -> tuple[tuple[ToyRequest, ToyRequest], Callable[[Tokens], Lengths]]:
    """Two toy requests and an admission that the production scheduler decides without bias."""
    requests = (draw(toy_requests()), draw(toy_requests()))
    rates = draw(jagged_rates(9) | smooth_rates(9))
    sps = SpsCurve.from_points(range(1, len(rates) + 1), rates)
    prefill_tokens = draw(st.integers(0, 2))
    earlier_RK = survival_of(requests, draw(st.tuples(*[st.sampled_from([(0, 0), (1, 0)])] * 2)))
    capacity = lagged_capacity(earlier_RK, sps, prefill_tokens=prefill_tokens)
    early = draw(st.booleans())

    def admit(tokens: Tokens) -> Lengths:
        survival_RK = survival_of(requests, tokens)
        if early:
            return tuple(algorithm_1(survival_RK, sps, prefill_tokens=prefill_tokens).tolist())
        return tuple(top_k_admission(survival_RK, capacity).tolist())

    return requests, admit


@given(round_=lossless_rounds())
@settings(max_examples=60, deadline=None)
def test_a_referee_who_sees_admitted_tokens_only_can_play_every_round(round_: tuple) -> None:
    _, admit = round_
    assert is_sequential(admit, num_requests=2, block_size=2, vocab_size=2)


@given(round_=lossless_rounds())
@settings(max_examples=40, deadline=None)
def test_two_requests_jointly_emit_the_targets_law(round_: tuple) -> None:
    requests, admit = round_
    emitted = round_law(requests, admit, block_size=2, horizon=2)
    assert {key: p for key, p in emitted.items() if p} == target_law(requests, horizon=2)


# Rules that anticipate.


def test_mutation_each_verified_iff_the_other_drafted_a() -> None:
    def each_other(tokens: Tokens) -> Lengths:
        return (int(tokens[1][0] == A), int(tokens[0][0] == A))

    # Neither looks at its own token, yet no order exists in which both could be decided.
    assert not is_sequential(each_other, num_requests=2, block_size=1, vocab_size=2)
    pair = (APPENDIX_A, APPENDIX_A)
    law = round_law(pair, each_other, block_size=1, horizon=1)
    assert law[((A,), (A,))] == Fraction(41, 80)

    def one_way(tokens: Tokens) -> Lengths:
        return (int(tokens[1][0] == A), 1)

    assert is_sequential(one_way, num_requests=2, block_size=1, vocab_size=2)
    law = round_law(pair, one_way, block_size=1, horizon=1)
    assert law[((A,), (A,))] == Fraction(49, 100)


def test_mutation_preempting_a_round_whose_admitted_length_lacks_a_page() -> None:
    flat = SpsCurve.from_points([1, 2, 3], [Fraction(1)] * 3)

    def length_of(tokens: tuple[Prefix, ...]) -> int:
        return int(algorithm_1(survival_of((APPENDIX_A,), tokens), flat)[0])

    assert length_of(((A, A),)) == 2
    assert length_of(((B, A),)) == 1

    def probability_of_a(pages_for: Callable[[tuple[Prefix, ...]], int], free: int) -> Fraction:
        def admit(tokens: tuple[Prefix, ...]) -> Lengths | None:
            return (length_of(tokens),) if pages_for(tokens) <= free else None

        return round_law((APPENDIX_A,), admit, block_size=2, horizon=1)[((A,),)]

    # Pages for what was admitted: the round goes ahead after B and is abandoned after A.
    assert probability_of_a(length_of, free=1) == Fraction(11, 20)
    # Pages for the whole block, whatever was drafted: abandoned always or never.
    assert probability_of_a(lambda tokens: 2, free=1) == Fraction(7, 10)
    assert probability_of_a(lambda tokens: 2, free=2) == Fraction(7, 10)


def test_mutation_global_search_cannot_be_played() -> None:
    def lengths_of(search_for: Callable[..., np.ndarray]) -> Callable[[Tokens], Lengths]:
        return lambda tokens: tuple(search_for(survival_of((APPENDIX_A,), tokens), CLIFF).tolist())

    sizes = {"num_requests": 1, "block_size": 2, "vocab_size": 2}
    assert not is_sequential(lengths_of(unconstrained_search), **sizes)
    assert is_sequential(lengths_of(algorithm_1), **sizes)
