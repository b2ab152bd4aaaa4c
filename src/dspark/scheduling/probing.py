"""Rounds that are verified whole, so that recalibration sees what a policy would not verify."""

from dspark.core.records import StepRecord
from dspark.core.sampling import VerificationRule
from dspark.scheduling.arrays import BoolArray, IntArray
from dspark.scheduling.policies import Policy, RoundView

EVERY = 100
"""Steps between two probes: 1% of rounds, a few percent of draft tokens."""


class Probing:
    """Another policy, but every so manieth step drafts whole blocks and verifies them whole.

    Which steps those are follows from their number alone, so no draft, confidence or outcome has a
    say (law 2), and what probes find is of all rounds alike. All requests probe in the same step: a
    block is drafted for all of them together, and is as long as the longest.
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
        return view.block_size if self._probes(view) else length

    def admit(self, view: RoundView) -> IntArray:
        lengths = self.policy.admit(view)
        return view.max_admit_R if self._probes(view) else lengths

    def _probes(self, view: RoundView) -> bool:
        return view.step % self.every == self.every - 1

    def observe(self, record: StepRecord) -> None:
        self.policy.observe(record)

    def fresh(self) -> "Probing":
        return Probing(self.policy.fresh(), every=self.every)
