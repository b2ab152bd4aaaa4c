"""The gate: what it predicts before a draft, and what it costs to be wrong."""

from dataclasses import replace

import numpy as np
import pytest

from dspark.core.records import RoundRecord, StepRecord
from dspark.scheduling.by_confidence import Async, Early, Marginal
from dspark.scheduling.cost_model import PartCost
from dspark.scheduling.gate import Gate
from dspark.scheduling.policies import RoundView
from dspark.scheduling.throughput import Throughput
from tests.scheduling.models import curve, linear_model

BLOCK = 4


def view_of(requests: tuple[int, ...], step: int, survival_RK: np.ndarray | None = None):
    count = len(requests)
    return RoundView(
        step=step,
        requests=requests,
        rounds=(step,) * count,
        block_size=BLOCK,
        prefill_tokens=0,
        max_admit_R=np.full(count, BLOCK),
        context_R=np.full(count, 50),
        survival_RK=survival_RK,
    )


class Machine:
    """Runs a policy on texts whose drafts survive as `survival` of (request, step) says.

    What was promised comes true on average: accepted is the sum of survival, rounded by carry.
    """

    def __init__(self, policy, survival) -> None:
        self.policy, self.survival = policy, survival
        self.owed: dict[int, float] = {}
        self.lengths: list[int] = []

    def step(self, requests: tuple[int, ...], step: int) -> np.ndarray:
        wanted = self.policy.wants_draft(view_of(requests, step))
        drafted = self.policy.draft_length(view_of(requests, step)) if wanted.any() else 0
        self.lengths.append(drafted)
        survival_RK = np.array([self.survival(r, step) for r in requests]) * wanted[:, None]
        survival_RK[:, drafted:] = 0.0
        view = replace(
            view_of(requests, step, survival_RK if wanted.any() else None),
            max_admit_R=np.where(wanted, drafted, 0),
            draft_length=drafted if wanted.any() else None,
        )
        lengths = self.policy.admit(view)
        rounds = []
        for r, (request, length) in enumerate(zip(requests, lengths.tolist(), strict=True)):
            owed = self.owed.get(request, 0.0) + float(survival_RK[r, :length].sum())
            accepted = min(length, int(owed))
            self.owed[request] = owed - accepted
            rounds.append(
                RoundRecord(
                    request=request, round=step, proposed=drafted * int(wanted[r]), admitted=length,
                    accepted=accepted, emitted=accepted + 1, ended=False,
                )
            )  # fmt: skip
        tokens = len(requests) + int(lengths.sum())
        record = StepRecord(step=step, batch_tokens=tokens, prefill_tokens=0, rounds=tuple(rounds))
        self.policy.observe(record)
        return wanted

    def run(self, requests: tuple[int, ...], steps: range) -> np.ndarray:
        return np.array([self.step(requests, step) for step in steps])


GOOD = np.array([0.9, 0.8, 0.7, 0.6])
BAD = np.array([0.2, 0.1, 0.05, 0.02])
# A row costs a tenth of a step's fixed part, a block a fifth and more.
MODEL = linear_model(fixed=1.0, row=0.1, draft=0.3, draft_row=0.02)


@pytest.mark.parametrize("policy", [Early, Async])
def test_drafts_that_pay_are_always_made(policy) -> None:
    assert Machine(policy.gated(MODEL), lambda r, t: GOOD).run((0, 1), range(60)).all()


@pytest.mark.parametrize("policy", [Early, Async])
def test_drafts_that_lose_are_given_up_and_probed_within_the_share(policy) -> None:
    wanted = Machine(policy.gated(MODEL), lambda r, t: BAD).run((0,), range(1000))[:, 0]
    gave_up = int(np.argmin(wanted))
    assert 0 < gave_up < 15
    probes = wanted[gave_up:].sum()
    # A probe takes about 0.32 and at most 4 rows of 0.1; 1% of a plain step is 0.011.
    assert 1000 * 0.011 / 0.8 < probes < 1000 * 0.011 / 0.3


def test_a_text_that_becomes_easy_gets_its_drafts_back() -> None:
    machine = Machine(Early.gated(MODEL), lambda r, t: BAD if t < 200 else GOOD)
    wanted = machine.run((0,), range(400))[:, 0]
    assert wanted[150:200].mean() < 0.1
    assert wanted[300:].all()


def test_requests_are_told_apart() -> None:
    machine = Machine(Early.gated(MODEL), lambda r, t: GOOD if r < 2 else BAD)
    wanted = machine.run((0, 1, 2, 3), range(300))[100:]
    assert wanted[:, :2].all()
    # Beside others that draft anyway, a probe costs little, so there are more of them.
    assert wanted[:, 2:].mean() < 0.4


def test_a_new_request_starts_from_the_mean_of_the_others() -> None:
    machine = Machine(Early.gated(MODEL), lambda r, t: BAD)
    machine.run((0,), range(300))
    assert not machine.step((1,), 300)[0]
    other = Machine(Early.gated(MODEL), lambda r, t: GOOD)
    other.run((0,), range(300))
    assert other.step((1,), 300)[0]


def test_load_alone_can_close_it() -> None:
    # Rows are dear, blocks cheap: alone a draft pays, beside 40 prompt tokens' worth of work the
    # block is cheaper still, but a machine that is out of arithmetic has nothing to give.
    free = linear_model(fixed=1.0, row=0.01, draft=0.1)
    full = linear_model(fixed=0.01, row=1.0, draft=0.1)
    survival = np.array([0.6, 0.36, 0.2, 0.1])
    for model, pays in ((free, True), (full, False)):
        wanted = Machine(Early.gated(model), lambda r, t: survival).run((0,), range(200))
        assert wanted[50:].mean() > 0.95 if pays else wanted[50:].mean() < 0.1


def test_a_block_shared_by_many_pays_where_one_alone_does_not() -> None:
    # The block costs 1.5 s, whoever drafts; a step 1.5 s with one request and 5 s with eight.
    dear = linear_model(fixed=1.0, row=0.01, draft=1.5, draft_row=0.0)
    forward = replace(dear.forward, requests=curve(0.0, 0.5, slope=0.5))
    dear = replace(dear, forward=forward)
    survival = np.array([0.5, 0.25, 0.1, 0.05])
    alone = Machine(Early.gated(dear), lambda r, t: survival).run((0,), range(200))
    together = Machine(Early.gated(dear), lambda r, t: survival).run((*range(8),), range(200))
    assert alone[50:].mean() < 0.1
    assert together[50:].all()


def test_promises_that_do_not_come_true_close_it() -> None:
    class Liar(Machine):
        def step(self, requests, step):
            self.owed = dict.fromkeys(requests, -10.0)  # nothing is ever accepted
            return super().step(requests, step)

    policy = Early.gated(MODEL)
    wanted = Liar(policy, lambda r, t: GOOD).run((0,), range(400))[:, 0]
    assert wanted[:3].all()
    assert wanted[200:].mean() < 0.1


def test_a_margin_lies_between_closing_and_opening() -> None:
    gates = []
    for drafting in (True, False):
        gate = Gate(MODEL)
        gate.open(view_of((0,), 0))
        item = gate._recent[0]
        item.drafting, item.admitted = drafting, 2.0
        price = gate.throughput.rate(view_of((0,), 0)) * (
            MODEL.draft_seconds(1, length=BLOCK, requests=1, context_tokens=50) + 0.2
        )
        item.gain = price  # just what it costs
        gates.append(bool(gate.open(view_of((0,), 1))[0]))
    assert gates == [True, False]


def test_ids_that_are_gone_are_forgotten_and_a_fresh_policy_knows_nothing() -> None:
    policy = Early.gated(MODEL)
    Machine(policy, lambda r, t: BAD).run((0, 1), range(100))
    policy.wants_draft(view_of((5,), 100))
    assert [*policy.gate._recent] == [5]
    assert policy.fresh().gate._mean is None


def test_nobody_may_draft_and_nobody_is_there() -> None:
    gate = Gate(MODEL)
    assert gate.open(replace(view_of((0,), 0), max_admit_R=np.array([0]))).tolist() == [False]
    assert gate.open(view_of((), 1)).tolist() == []


@pytest.mark.parametrize("policy", [Early, Async])
def test_what_calibration_expects_decides_before_the_first_draft(policy) -> None:
    """A batch where drafts cannot pay is not charged for finding out."""
    bad = policy.gated(MODEL, expected_K=BAD)
    wanted = Machine(bad, lambda r, t: BAD).run((0, 1), range(1000))
    assert not wanted[:20].any()
    assert wanted.any(), "it is tried now and then all the same"
    good = policy.gated(MODEL, expected_K=GOOD)
    assert Machine(good, lambda r, t: GOOD).run((0, 1), range(60)).all()


def test_an_expectation_that_is_wrong_is_given_up() -> None:
    hopeful = Early.gated(MODEL, expected_K=GOOD)
    assert Machine(hopeful, lambda r, t: BAD).run((0,), range(300))[100:].mean() < 0.1
    doubting = Early.gated(MODEL, expected_K=BAD)
    assert Machine(doubting, lambda r, t: GOOD).run((0,), range(300))[200:].all()


def test_a_copy_begins_with_the_same_expectation() -> None:
    policy = Early.gated(MODEL, expected_K=BAD)
    Machine(policy, lambda r, t: GOOD).run((0,), range(300))
    assert not Machine(policy.fresh(), lambda r, t: BAD).run((0,), range(10)).any()


def test_a_step_that_only_reads_prompts_decides_nothing() -> None:
    """The engine's first step has no decoding request: at no load the longest draft is free."""
    model = linear_model(fixed=1.0, row=0.5, draft=0.05, draft_row=0.01)
    expected = np.array([0.6, 0.1, 0.03, 0.01])
    policy = Early.gated(model, expected_K=expected)
    policy.wants_draft(view_of((), 0))
    policy.admit(view_of((), 0))
    wanted = Machine(policy, lambda r, t: expected).run((0,), range(1, 100))
    assert wanted.all()


# A slot costs a draft half of what a row costs a step; lengths of 1, 2 and 4 were measured.
BY_SLOT = replace(
    linear_model(fixed=1.0, row=0.1, draft=0.1, draft_row=0.0),
    draft=PartCost(curve(0.0, slope=0.05), curve(0.0, 0.1)),
    lengths=(1, 2, 4),
)
SHORT = np.array([0.9, 0.15, 0.02, 0.01])


@pytest.mark.parametrize("policy", [Early, Async, Marginal])
def test_no_more_slots_are_drafted_than_pay(policy) -> None:
    machine = Machine(policy.gated(BY_SLOT, expected_K=GOOD), lambda r, t: GOOD)
    machine.run((0, 1), range(60))
    assert set(machine.lengths) == {4}
    machine = Machine(policy.gated(BY_SLOT, expected_K=GOOD), lambda r, t: SHORT)
    assert machine.run((0, 1), range(300))[100:].all()
    assert machine.lengths[0] == 4
    assert np.mean(np.array(machine.lengths[200:]) == 1) > 0.9


@pytest.mark.parametrize("expected_K", [None, GOOD, SHORT])
def test_drafts_grow_again_when_texts_become_easy(expected_K) -> None:
    machine = Machine(
        Early.gated(BY_SLOT, expected_K=expected_K), lambda r, t: SHORT if t < 300 else GOOD
    )
    machine.run((0,), range(900))
    assert np.mean(np.array(machine.lengths[200:300])) < 1.5
    assert np.mean(np.array(machine.lengths[800:])) > 3.5


def test_a_table_of_one_length_knows_no_other() -> None:
    machine = Machine(Early.gated(MODEL, expected_K=SHORT), lambda r, t: SHORT)
    machine.run((0,), range(100))
    assert set(machine.lengths) <= {0, BLOCK}


def test_a_step_is_priced_by_the_length_of_its_draft() -> None:
    """Throughput after short drafts is not that of whole blocks, nor is the round's curve."""
    speedups = []
    for proposed in (1, 4):
        throughput = Throughput(BY_SLOT)
        rounds = tuple(
            RoundRecord(
                request=r, round=1, proposed=proposed, admitted=1, accepted=1, emitted=2,
                ended=False,
            )
            for r in range(2)
        )  # fmt: skip
        record = StepRecord(step=1, batch_tokens=4, prefill_tokens=0, rounds=rounds)
        throughput.observe(view_of((0, 1), 1), record)
        speedups.append(throughput.speedup)
    assert speedups[0] > speedups[1] > 1

    survival_RK = np.tile(GOOD, (2, 1))
    short, whole = (
        Early(BY_SLOT).round_sps(replace(view_of((0, 1), 1, survival_RK), draft_length=length))(4)
        for length in (1, None)
    )
    seconds = 1 / whole - 1 / short
    assert seconds == pytest.approx(0.05 * 2 * 3)
