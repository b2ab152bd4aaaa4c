"""Policies that weigh survival against cost: `early`, `async`, `global`, `marginal`.

All walk the greedy path of `search` and are priced by a cost of this machine. They differ in what
they read, and so in where they are lossless:

early     Algorithm 1: this round's survival, up to the first position that does not gain;
async     this round's survival fills a number of rows that survival of two rounds before decided,
          searched over the whole, jagged curve (section 5.2);
global    this round's survival, searched over the whole curve: `coupled` only (Appendix A);
marginal  this round's survival, up to the first position whose tokens are worth less than its
          time, at the rate tokens were made lately.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from dspark.core.records import StepRecord
from dspark.core.sampling import RULES, VerificationRule
from dspark.scheduling.arrays import BoolArray, FloatArray, IntArray
from dspark.scheduling.capacity import LaggedSurvival, lagged_capacity
from dspark.scheduling.cost_model import CostModel, ForwardCost, Sps
from dspark.scheduling.gate import Gate
from dspark.scheduling.policies import Policy, RoundView
from dspark.scheduling.search import (
    algorithm_1,
    greedy_path,
    top_k_admission,
    unconstrained_search,
)
from dspark.scheduling.throughput import Throughput

_FIRST_CONFIDENCE = 0.7
"""Of every position, before anything is known and without a calibration."""
_HULLS_KEPT = 4096


class RoundCost(Protocol):
    """What a policy asks of a cost model, whole or partial."""

    def round_sps(self, *, requests: int, drafting: int, length: int, context_tokens: float) -> Sps:
        """SPS(B) of a round of these requests, `drafting` of which have a draft of `length`."""
        ...


class ByConfidence(ABC):
    """What these policies share. Without a `gate` every request is drafted for."""

    form: ClassVar[str]
    drafts: ClassVar[bool] = True
    longest: ClassVar[int | None] = None
    rules: ClassVar[frozenset[VerificationRule]] = frozenset(RULES)
    reads_survival: ClassVar[bool] = True

    def __init__(
        self,
        cost: RoundCost,
        gate: Gate | None = None,
        expected_K: npt.ArrayLike | None = None,
    ) -> None:
        """expected_K: survival [K] of a request that nothing is known of, from calibration."""
        self.cost = cost
        self.gate = gate
        self.expected_K = expected_K
        self._view: RoundView | None = None

    @classmethod
    def gated(
        cls,
        model: CostModel,
        *,
        forward_only: bool = False,
        expected_K: npt.ArrayLike | None = None,
    ) -> "ByConfidence":
        """The policy with a gate before it. forward_only: admission counts the target's forward
        alone, as the paper's Theta does; else the whole step. The gate always counts everything."""
        cost = ForwardCost(model) if forward_only else model
        return cls(cost, Gate(model, expected_K), expected_K)

    @property
    def name(self) -> str:
        return f"{self.form}:forward" if isinstance(self.cost, ForwardCost) else self.form

    def wants_draft(self, view: RoundView) -> BoolArray:
        return view.max_admit_R > 0 if self.gate is None else self.gate.open(view)

    def draft_length(self, view: RoundView) -> int:
        return view.block_size if self.gate is None else self.gate.draft_length(view)

    def admit(self, view: RoundView) -> IntArray:
        self._view = view
        lengths = self._admit(view)
        if self.gate is not None:
            self.gate.drafted(view, lengths)
        return lengths

    def observe(self, record: StepRecord) -> None:
        view, self._view = self._view, None
        if view is not None:
            self._observe(view, record)

    def fresh(self) -> Policy:
        gate = None if self.gate is None else self.gate.fresh()
        return type(self)(self.cost, gate, self.expected_K)

    def round_sps(self, view: RoundView) -> Sps:
        return self.cost.round_sps(
            requests=len(view.requests),
            drafting=int((view.max_admit_R > 0).sum()),
            length=view.draft_length or view.block_size,
            context_tokens=float(view.context_R.sum()),
        )

    def _observe(self, view: RoundView, record: StepRecord) -> None:
        if self.gate is not None:
            self.gate.observe(view, record)

    @abstractmethod
    def _admit(self, view: RoundView) -> IntArray: ...


class Early(ByConfidence):
    form = "early"

    def _admit(self, view: RoundView) -> IntArray:
        if view.survival_RK is None:
            return _nobody(view)
        return algorithm_1(
            view.survival_RK,
            self.round_sps(view),
            prefill_tokens=view.prefill_tokens,
            max_admit_R=view.max_admit_R,
        )


class Global(ByConfidence):
    form = "global"
    rules = frozenset({"coupled"})

    def _admit(self, view: RoundView) -> IntArray:
        if view.survival_RK is None:
            return _nobody(view)
        return unconstrained_search(
            view.survival_RK,
            self.round_sps(view),
            prefill_tokens=view.prefill_tokens,
            max_admit_R=view.max_admit_R,
        )


class Async(ByConfidence):
    """The batch's requests and prefill tokens are those of the round: the plain loop knows them.
    Only survival is as old as a pipeline would have it."""

    form = "async"
    _lagged: LaggedSurvival | None = None

    def _admit(self, view: RoundView) -> IntArray:
        if self._lagged is None:
            guess_K = _FIRST_CONFIDENCE ** np.arange(1, view.block_size + 1)
            self._lagged = LaggedSurvival(guess_K if self.expected_K is None else self.expected_K)
        if view.survival_RK is None:
            self._lagged.record([], np.zeros((0, view.block_size)))
            return _nobody(view)
        capacity = lagged_capacity(
            self._lagged.before(view.requests),
            self.round_sps(view),
            prefill_tokens=view.prefill_tokens,
            max_admit_R=view.max_admit_R,
        )
        drafted = np.flatnonzero(view.max_admit_R > 0)
        self._lagged.record(
            [view.requests[r] for r in drafted], view.survival_RK[drafted], view.draft_length
        )
        return top_k_admission(view.survival_RK, capacity, max_admit_R=view.max_admit_R)


class Marginal(ByConfidence):
    """Admits while survival > lambda * the seconds that one more row takes.

    Rows are priced along the convex hull of the step's cost from here on, so that a cliff of the
    machine is spread over the rows that it admits: with prices that only rise, the first loss is
    also the last word, and stopping there anticipates nothing.
    """

    form = "marginal"

    def __init__(
        self,
        cost: CostModel,
        gate: Gate | None = None,
        expected_K: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(cost, gate, expected_K)
        self._model = cost
        self.throughput = Throughput(cost) if gate is None else gate.throughput
        self._slopes: dict[tuple[int, int], FloatArray] = {}

    def _observe(self, view: RoundView, record: StepRecord) -> None:
        super()._observe(view, record)
        if self.gate is None:
            self.throughput.observe(view, record)

    def _admit(self, view: RoundView) -> IntArray:
        if view.survival_RK is None:
            return _nobody(view)
        path = greedy_path(view.survival_RK, view.max_admit_R)
        requests, context = len(view.requests), float(view.context_R.sum())
        # How many rows there may be is not the draft's to say: those of survival 0 count, too.
        most = int(view.max_admit_R.sum())
        slopes = self._hull_slopes(requests + view.prefill_tokens, most)[: len(path.entries_E)]
        pair = self._model.pair_seconds * context / requests
        gains = path.survival_E - self.throughput.rate(view) * (slopes + pair)
        losses = gains <= 0
        return path.lengths(int(np.argmax(losses)) if losses.any() else len(gains))

    def _hull_slopes(self, base: int, rows: int) -> FloatArray:
        """Seconds of each of `rows` more rows, beside a batch of `base`; kept, as loads recur."""
        if (base, rows) not in self._slopes:
            if len(self._slopes) == _HULLS_KEPT:
                self._slopes.clear()
            tokens = np.arange(base, base + rows + 1)
            seconds = self._model.step_seconds(tokens, requests=1, context_tokens=0.0)
            self._slopes[base, rows] = hull_slopes(seconds)
        return self._slopes[base, rows]


def hull_slopes(values: FloatArray) -> FloatArray:
    """Slopes [n - 1] of the largest convex function below `values` [n]; they never fall."""
    corners: list[int] = []
    for i, value in enumerate(values.tolist()):
        while len(corners) >= 2:
            a, b = corners[-2], corners[-1]
            if (values[b] - values[a]) * (i - b) < (value - values[b]) * (b - a):
                break
            corners.pop()
        corners.append(i)
    steps = np.diff(corners)
    return np.repeat(np.diff(values[corners]) / steps, steps)


def _nobody(view: RoundView) -> IntArray:
    return np.zeros(len(view.requests), dtype=np.int64)
