"""Rounds that are verified whole, so that recalibration sees what a policy would not verify."""

import numpy as np

from dspark.core.records import StepRecord
from dspark.core.sampling import VerificationRule
from dspark.scheduling.arrays import BoolArray, IntArray
from dspark.scheduling.policies import Policy, RoundView

EVERY = 100
"""Rounds between two probes of a request: under 1% of rounds, a few percent of draft tokens."""


class Probing:
    """Another policy, but each request's every so manieth round verifies all that was drafted.

    Which rounds those are follows from request and round number alone, so no draft, confidence or
    outcome has a say (law 2), and what probes find is of all rounds alike. Requests probe at
    different steps.
    """

    def __init__(self, policy: Policy, *, every: int = EVERY) -> None:
        assert every >= 1
        self.policy = policy
        self.every = every

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def drafts(self) -> bool:
        return self.policy.drafts

    @property
    def longest(self) -> int | None:
        return None  # a probe verifies a whole block

    @property
    def rules(self) -> frozenset[VerificationRule]:
        return self.policy.rules

    @property
    def reads_survival(self) -> bool:
        return True  # what probes find refits the calibration

    def wants_draft(self, view: RoundView) -> BoolArray:
        return self.policy.wants_draft(view)

    def draft_length(self, view: RoundView) -> int:
        length = self.policy.draft_length(view)
        return view.block_size if self._probed(view).any() else length

    def admit(self, view: RoundView) -> IntArray:
        lengths = self.policy.admit(view)
        probed: IntArray = np.where(self._probed(view), view.max_admit_R, lengths)
        return probed

    def _probed(self, view: RoundView) -> BoolArray:
        keys = np.array(view.requests, dtype=np.int64) + np.array(view.rounds, dtype=np.int64)
        probed: BoolArray = keys % self.every == 0
        return probed

    def observe(self, record: StepRecord) -> None:
        self.policy.observe(record)

    def fresh(self) -> "Probing":
        return Probing(self.policy.fresh(), every=self.every)
