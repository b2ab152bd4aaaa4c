"""Whether a draft will pay for a request, decided before it is made (DESIGN decision 11).

A draft of request r brings `gain` tokens and costs the draft block and the verification of
`admitted` rows. It pays where gain > lambda * seconds, lambda being recent throughput. What a
draft of r will bring is predicted from its last drafts: the survival that was admitted, scaled by
how much of predicted survival came true lately. What it costs depends on the batch of now. Most of
a draft block's cost does not depend on how many draft, so the batch decides together: the best
requests first, as many as pay for the block between them.

How many slots they draft is decided as well, where a table has the cost of several lengths: as many
as pay, by what each slot has brought lately above the price of verifying it. A slot that is not
drafted is not forgotten; what is known of it drifts towards what the slots before it suggest, so
that it is tried again when they get better.

Drafting requests must lose, and the others win, by a margin before they change over (hysteresis).
A request that does not draft is tried again now and then, as often as a small share of the step's
time allows. Features of its text go on into the drafter's context, in batches (law 7).

Only committed tokens, admitted survival and load of earlier rounds are read, never this round's
random numbers, so the gate is lossless with any policy behind it (law 2).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.core.records import StepRecord
from dspark.scheduling.arrays import BoolArray, FloatArray, IntArray
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.policies import RoundView
from dspark.scheduling.throughput import Throughput

_HYSTERESIS = 0.05
_PROBE_SHARE = 0.01
"""Of the time of plain steps, for drafts that are not expected to pay."""
_FIRST_GAIN, _FIRST_ADMITTED = 1.0, 2.0
"""Of a drafter that nothing is known of: good enough to be tried."""
_WEIGHT, _PROBE_WEIGHT, _TRUST_WEIGHT = 0.15, 0.4, 0.02
"""Of the newest draft in a request's averages, while drafting and when probed; and in the share of
survival that came true."""
_DRAFTS_IN_MEAN = 50
"""Of all requests: about so many weigh in what is expected of a new one."""
_NEXT_SLOT, _DRIFT = 0.7, 0.005
"""What a slot that is not drafted might bring, in shares of the slot before it: as good texts have
it. And how fast what is known of it drifts there, a draft."""


@dataclass(slots=True)
class _Recent:
    """What drafts of a request have brought lately."""

    gain: float
    """Survival admitted: tokens expected beyond the target's own one."""
    admitted: float
    drafting: bool = True

    def update(self, gain: float, admitted: float, weight: float) -> None:
        self.gain += weight * (gain - self.gain)
        self.admitted += weight * (admitted - self.admitted)


class Gate:
    """One a policy; `open` before a draft, `drafted` after admission, `observe` after the step."""

    def __init__(self, cost: CostModel, expected_K: npt.ArrayLike | None = None) -> None:
        """expected_K: survival [K] of a request that nothing is known of, from calibration; without
        it a drafter is taken for good enough to be tried."""
        self._cost = cost
        self.throughput = Throughput(cost)
        self._recent: dict[int, _Recent] = {}
        self._expected_K = None if expected_K is None else np.asarray(expected_K, dtype=np.float64)
        self._mean: _Recent | None = None
        self._drafts = 1 if expected_K is None else _DRAFTS_IN_MEAN
        self._trust = 1.0
        self._credit = 0.0
        self._expected: dict[int, float] = {}
        self._net_K: FloatArray | None = None
        """Survival of each slot above its price, mean of a draft; None before the first."""
        self._price = 0.0
        """What a verified row must bring in this round, in tokens."""
        self._length: int | None = None
        """Of the last draft, or what the next one is expected to have; None: a whole block."""
        self._known = 0
        """Slots of the draft before."""

    def open(self, view: RoundView) -> BoolArray:
        """Which requests [R] to draft for."""
        # Requests that are gone are forgotten; one that comes back starts as a new one does.
        known = {r: item for r in view.requests if (item := self._recent.get(r))}
        may_draft = view.max_admit_R > 0
        if not may_draft.any():
            self._recent = known
            return may_draft
        # Not earlier: a step that only reads prompts has no load to price a draft by.
        mean = self._mean = self._mean or self._first(view)
        self._recent = {
            r: known.get(r) or _Recent(mean.gain, mean.admitted, drafting=True)
            for r in view.requests
        }
        recent = [*self._recent.values()]
        room_R = view.max_admit_R.astype(np.float64)
        admitted_R = np.minimum([item.admitted for item in recent], room_R)
        gain_R = self._trust * np.array([item.gain for item in recent])
        drafting_R = np.array([item.drafting for item in recent])
        margin_R = np.where(drafting_R, 1 + _HYSTERESIS, 1 - _HYSTERESIS)

        price = self._row_seconds(view, admitted_R[may_draft])
        worth = self.throughput.rate(view)
        self._price = worth * price
        net_R = np.where(may_draft, margin_R * gain_R - self._price * admitted_R, -np.inf)
        chosen = self._best(view, net_R, worth)
        for item, stays in zip(recent, chosen.tolist(), strict=True):
            item.drafting = stays
        return chosen | self._probes(view, may_draft & ~chosen, chosen, price * admitted_R)

    def draft_length(self, view: RoundView) -> int:
        """How many slots to draft: of the lengths whose cost is known, the one that pays best."""
        if self._net_K is not None:
            self._length = self._best_length(view, self._net_K)
        return self._length or view.block_size

    def drafted(self, view: RoundView, lengths_R: IntArray) -> None:
        """Told what was admitted of the drafts there are."""
        self._expected = {}
        if view.survival_RK is None:
            return
        assert self._mean is not None, "drafts are asked for first"
        self._update_slots(view.survival_RK[view.max_admit_R > 0], view.draft_length)
        for r in np.flatnonzero(view.max_admit_R > 0).tolist():
            request, length = view.requests[r], int(lengths_R[r])
            gain = float(view.survival_RK[r, :length].sum())
            item = self._recent[request]
            item.update(gain, length, _WEIGHT if item.drafting else _PROBE_WEIGHT)
            self._drafts = min(self._drafts + 1, _DRAFTS_IN_MEAN)
            self._mean.update(gain, length, 1 / self._drafts)
            self._expected[request] = gain

    def fresh(self) -> "Gate":
        return Gate(self._cost, self._expected_K)

    def observe(self, view: RoundView, record: StepRecord) -> None:
        """`view` is the one that admission saw."""
        self.throughput.observe(view, record)
        # An end of text cuts what is accepted, so rounds that end say nothing about survival.
        judged = [
            item for item in record.rounds if item.request in self._expected and not item.ended
        ]
        expected = sum(self._expected[item.request] for item in judged)
        if expected > 0:
            accepted = sum(item.accepted for item in judged)
            weight = min(1.0, _TRUST_WEIGHT * expected)
            self._trust += weight * (accepted / expected - self._trust)

    def _first(self, view: RoundView) -> _Recent:
        """What to expect of a draft before there was any: that of the length which pays best
        here."""
        if self._expected_K is None:
            return _Recent(_FIRST_GAIN, _FIRST_ADMITTED)
        gain_K = np.cumsum(self._expected_K)
        worth = self.throughput.rate(view)
        price_K = worth * np.array(
            [
                self._row_seconds(view, np.full(len(view.requests), length))
                for length in range(1, len(gain_K) + 1)
            ]
        )
        best = int(np.argmax(gain_K - price_K * np.arange(1, len(gain_K) + 1)))
        self._net_K = np.maximum(self._expected_K - price_K[best], 0.0)
        self._length = self._best_length(view, self._net_K)
        return _Recent(float(gain_K[best]), best + 1.0)

    def _update_slots(self, survival_DK: FloatArray, length: int | None) -> None:
        """Told the survival of the drafts [D] of a round, of which `length` slots were drafted."""
        K = survival_DK.shape[1]
        length = length or K
        net_K = np.maximum(survival_DK - self._price, 0.0).mean(axis=0)
        if self._net_K is None:
            self._net_K = net_K
        mean_K = self._net_K
        # Of a slot that was not drafted last time, there is little else to go by.
        weight_K = np.where(np.arange(K) < self._known, 1 / self._drafts, _PROBE_WEIGHT)
        self._known = length
        mean_K[:length] += (weight_K * (net_K - mean_K))[:length]
        beyond_K = mean_K[length - 1] * _NEXT_SLOT ** np.arange(1, K - length + 1)
        mean_K[length:] += _DRIFT * (beyond_K - mean_K[length:])

    def _best_length(self, view: RoundView, net_K: FloatArray) -> int:
        lengths = [k for k in self._cost.lengths if k < view.block_size] + [view.block_size]
        drafting = sum(item.drafting for item in self._recent.values()) or len(view.requests)
        worth = self.throughput.rate(view)
        brought_K = drafting * self._trust * np.cumsum(net_K)
        nets = [
            float(brought_K[length - 1])
            - worth * float(self._draft_seconds(view, np.array([drafting]), length)[0])
            for length in lengths
        ]
        return lengths[int(np.argmax(nets))]

    def _best(self, view: RoundView, net_R: FloatArray, worth: float) -> BoolArray:
        """The requests whose nets add up to most above what their draft block costs."""
        order = np.argsort(-net_R, kind="stable")
        order = order[: int((net_R > 0).sum())]
        blocks = worth * self._draft_seconds(view, np.arange(len(order) + 1))
        total = np.concatenate(([0.0], np.cumsum(net_R[order]))) - blocks
        chosen = np.zeros(len(net_R), dtype=np.bool_)
        chosen[order[: int(np.argmax(total))]] = True
        return chosen

    def _probes(
        self, view: RoundView, idle: BoolArray, chosen: BoolArray, verify_seconds_R: FloatArray
    ) -> BoolArray:
        """All idle requests, once the time saved up for it suffices; none until then."""
        if not idle.any():
            return idle
        requests = len(view.requests)
        self._credit += _PROBE_SHARE * float(
            self._cost.step_seconds(
                requests, requests=requests, context_tokens=float(view.context_R.sum())
            )
        )
        drafting = int(chosen.sum())
        few, many = self._draft_seconds(view, np.array([drafting, drafting + int(idle.sum())]))
        price = float(many - few + verify_seconds_R[idle].sum())
        if self._credit < price:
            return np.zeros_like(idle)
        self._credit = 0.0
        return idle

    def _row_seconds(self, view: RoundView, admitted_R: FloatArray) -> float:
        """Seconds that a verified row costs, on average over those expected in this batch."""
        rows = max(1, int(np.ceil(admitted_R.sum())))
        requests = len(view.requests)
        base = requests + view.prefill_tokens
        few, many = self._cost.step_seconds(
            [base, base + rows], requests=requests, context_tokens=float(view.context_R.sum())
        )
        return float(many - few) / rows

    def _draft_seconds(
        self, view: RoundView, counts: IntArray, length: int | None = None
    ) -> FloatArray:
        """Of drafts for so many requests, by default of the length expected."""
        requests, context = len(view.requests), float(view.context_R.sum())
        length = length or self._length or view.block_size
        return np.array(
            [
                self._cost.draft_seconds(
                    count, length=length, requests=requests, context_tokens=context
                )
                for count in counts.tolist()
            ]
        )
