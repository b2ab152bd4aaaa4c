"""Laws 1, 2 and 3 over the policies that serve: state, gate and lag included."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.sampling import SamplingParams
from dspark.scheduling import by_confidence, gate
from dspark.scheduling.by_confidence import Async, Early, Global, Marginal
from dspark.scheduling.capacity import LaggedSurvival
from dspark.scheduling.cost import SpsCurve
from dspark.scheduling.cost_model import CurveCost, PartCost
from dspark.scheduling.policies import FixedLength, Off, Policy, RoundView, Threshold
from dspark.scheduling.survival import survival_probabilities
from tests.laws.harness import Request, distance, target_law
from tests.laws.policy_runs import PolicyRun
from tests.laws.toys import Toy
from tests.oracles.exact_round import (
    APPENDIX_A,
    APPENDIX_A_RATES,
    A,
    confidences,
    round_law,
)
from tests.oracles.scheduling import is_sequential
from tests.scheduling.models import curve, step_model
from tests.scheduling.strategies import FLOAT_CONFIDENCE

LENGTH = 4
EXACT = 1e-12
# Jagged, as measured costs are, and dear enough that gates change their minds.
MODEL = step_model(0.7, 1.0, 1.45, 1.8, 1.9, 2.1, 2.2, 2.5, draft=0.25)

BY_SLOT = replace(
    step_model(1.0, 1.15, 1.3, 1.45, 1.6, 1.75, 1.9, 2.05),
    draft=PartCost(curve(0.0, slope=0.1), curve(0.0, 0.02)),
    lengths=(1, 2),
)
"""Where a gate may choose between drafts of one token and of two."""

JAGGED = CurveCost(SpsCurve.from_points(range(1, 9), [1.5, 1.0, 0.69, 0.55, 0.52, 0.48, 0.45, 0.4]))
"""The curve on which a biased search is seen; see test_losslessness."""

EXPECTED = (0.8, 0.5)
"""As a calibration would have it: drafts of two tokens, sometimes worth their time."""

POLICIES: dict[str, Policy] = {
    "off": Off(),
    "fixed:2": FixedLength(2),
    "threshold:0.7": Threshold(0.7),
    "early": Early.gated(MODEL),
    "early:forward": Early.gated(MODEL, forward_only=True),
    "async": Async.gated(MODEL),
    "marginal": Marginal.gated(MODEL),
    "early, with an expectation": Early.gated(MODEL, expected_K=EXPECTED),
    "async, with an expectation": Async.gated(MODEL, expected_K=EXPECTED),
    "early, drafts of two lengths": Early.gated(BY_SLOT),
    "async, drafts of two lengths": Async.gated(BY_SLOT, expected_K=EXPECTED),
    "marginal, drafts of two lengths": Marginal.gated(BY_SLOT),
    "early, no gate": Early(MODEL),
    "async, no gate": Async(MODEL),
    "marginal, no gate": Marginal(MODEL),
    "early on a jagged curve, no gate": Early(JAGGED),
    "async on a jagged curve, no gate": Async(JAGGED),
}
GATED = (
    "early",
    "early:forward",
    "async",
    "marginal",
    "early, with an expectation",
    "async, with an expectation",
    "early, drafts of two lengths",
    "async, drafts of two lengths",
    "marginal, drafts of two lengths",
)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates that believe the last draft alone, and probe often: the more they depend on it."""
    monkeypatch.setattr(gate, "_WEIGHT", 1.0)
    monkeypatch.setattr(gate, "_PROBE_WEIGHT", 1.0)
    monkeypatch.setattr(gate, "_TRUST_WEIGHT", 0.5)
    monkeypatch.setattr(gate, "_PROBE_SHARE", 0.6)
    monkeypatch.setattr(gate, "_DRIFT", 0.5)
    monkeypatch.setattr(gate, "_DRAFTS_IN_MEAN", 1)


def two_requests(**sampling: float) -> list[Request]:
    """Toys on which what a draft token says about the slots after it matters."""
    return [
        Request(Toy(vocab=2, block=2, seed=18), SamplingParams(**sampling)),
        Request(Toy(vocab=2, block=2, seed=118), SamplingParams(temperature=1.0)),
    ]


def worst(run: PolicyRun, policy: Policy) -> float:
    law = run.law(policy.fresh())
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    return distance(law, target_law(run.requests, run.length))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.0}, {"top_p": 0.8}])
def test_two_requests_jointly_over_three_rounds(
    name: str, sampling: dict[str, float], hasty: None
) -> None:
    run = PolicyRun(two_requests(**sampling), LENGTH)
    assert worst(run, POLICIES[name]) < EXACT
    if name in GATED:
        assert run.seen_wanted == {True, False}, "the gate must have decided both ways"
        assert run.seen_drafts == ({1, 2} if "two lengths" in name else {2})
    if name not in ("off", "fixed:2"):
        assert len(run.seen_lengths) > 1, "admission must have decided more ways than one"


@pytest.mark.parametrize("name", GATED)
def test_alone_over_four_rounds_beside_prompt_tokens(name: str, hasty: None) -> None:
    run = PolicyRun(two_requests()[:1], 5, prefill_tokens=1)
    assert worst(run, POLICIES[name]) < EXACT


def test_mutation_capacity_read_from_the_current_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Async):
        def _admit(self, view: RoundView) -> np.ndarray:
            if view.survival_RK is not None:
                monkeypatch.setattr(
                    LaggedSurvival, "before", lambda own, requests: view.survival_RK
                )
            return super()._admit(view)

    globals()["Impatient"] = Impatient  # pickles find it by name
    Impatient.__qualname__ = "Impatient"
    assert worst(PolicyRun(two_requests(), LENGTH), Impatient(JAGGED)) > 1e-2


def test_mutation_the_break_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_confidence, "algorithm_1", by_confidence.unconstrained_search)
    assert worst(PolicyRun(two_requests(), LENGTH), Early(JAGGED)) > 1e-2


def test_mutation_global_under_rejection() -> None:
    assert Global.rules == {"coupled"}
    assert worst(PolicyRun(two_requests(), LENGTH), Global(JAGGED)) > 1e-2


def test_mutation_a_draft_cut_where_its_own_survival_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots may be left out before a draft, not after a look at the whole of it."""

    class Cutting(Early):
        def _admit(self, view: RoundView) -> np.ndarray:
            lengths = super()._admit(view)
            if view.survival_RK is None:
                return lengths
            sure = view.survival_RK[:, 1] > 0.9 * view.survival_RK[:, 0]
            return np.where(sure, lengths, 0)

    globals()["Cutting"] = Cutting  # pickles find it by name
    Cutting.__qualname__ = "Cutting"
    assert worst(PolicyRun(two_requests(), LENGTH), Cutting(BY_SLOT)) > 1e-2


# Law 2: changing what comes later.


def view_of(confidence_RK: np.ndarray, step: int, prefill_tokens: int) -> RoundView:
    count, block = confidence_RK.shape
    return RoundView(
        step=step,
        requests=tuple(range(count)),
        rounds=(step,) * count,
        block_size=block,
        prefill_tokens=prefill_tokens,
        max_admit_R=np.full(count, block),
        context_R=np.full(count, 20),
        confidence_RK=confidence_RK,
        survival_RK=survival_probabilities(confidence_RK),
    )


@pytest.mark.parametrize("name", ["threshold:0.7", *(n for n in POLICIES if "no gate" in n)])
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_later_confidences_change_no_admission(name: str, data: st.DataObject) -> None:
    """Without gates: those act before the draft, and cannot read it."""
    requests, block = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    rows = st.lists(FLOAT_CONFIDENCE, min_size=block, max_size=block)
    rounds = st.lists(rows, min_size=requests, max_size=requests).map(np.array)
    history = data.draw(st.lists(rounds, min_size=0, max_size=3))
    last, prefill_tokens = data.draw(rounds), data.draw(st.integers(0, 2))
    request, position = data.draw(st.integers(0, requests - 1)), data.draw(st.integers(1, block))
    other = last.copy()
    other[request, position:] = data.draw(rows)[position:]

    def lengths(final: np.ndarray) -> np.ndarray:
        policy = POLICIES[name].fresh()
        for step, confidence_RK in enumerate(history):
            policy.admit(view_of(confidence_RK, step, 0))
        return policy.admit(view_of(final, len(history), prefill_tokens))

    before, after = lengths(last), lengths(other)
    assert min(before[request], position) == min(after[request], position)


@pytest.mark.parametrize("policy", [Early, Marginal, Threshold])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_referee_who_sees_admitted_tokens_only_can_play_the_round(
    policy: type, data: st.DataObject
) -> None:
    """Two requests, a block of two, two tokens; confidences as any function of the token before."""
    value = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.9, 1.0])
    first = data.draw(st.tuples(value, value))
    second = data.draw(st.tuples(*[st.tuples(value, value)] * 2))
    times = data.draw(st.lists(st.sampled_from([1.0, 1.2, 1.3, 2.5]), min_size=7, max_size=7))
    own = Threshold(0.5) if policy is Threshold else policy(step_model(*np.sort(times)))
    prefill_tokens = data.draw(st.integers(0, 1))

    def admit(tokens: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        confidence_RK = np.array([[first[r], second[r][tokens[r][0]]] for r in range(2)])
        return tuple(own.fresh().admit(view_of(confidence_RK, 0, prefill_tokens)).tolist())

    assert is_sequential(admit, num_requests=2, block_size=2, vocab_size=2)


# Law 3, on the policies.

CLIFF = CurveCost(SpsCurve.from_points([1, 2, 3], APPENDIX_A_RATES))


def probability_of_a(policy: Policy) -> Fraction:
    def admit(tokens: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        rows = np.array([confidences(APPENDIX_A, tokens[0])], dtype=object)
        return tuple(policy.fresh().admit(view_of(rows, 0, 0)).tolist())

    return round_law((APPENDIX_A,), admit, block_size=2, horizon=1)[((A,),)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Global(CLIFF), Fraction(17, 20)),
        (Early(CLIFF), Fraction(7, 10)),
        (Async(CLIFF), Fraction(7, 10)),
        (FixedLength(1), Fraction(7, 10)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_appendix_a(policy: Policy, expected: Fraction) -> None:
    assert probability_of_a(policy) == expected
