"""What the engine asks of a calibration: one snapshot a round, and to be told what came of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dspark.calibration.arrays import FloatArray
from dspark.calibration.condition import CandidateSet, Condition
from dspark.calibration.confidence import Scaling, conditional_confidence
from dspark.core.records import StepRecord
from dspark.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The calibration of one moment. A round is scheduled with one snapshot from start to end."""

    number: int
    """0: what the bundle holds; one more for every refit while serving."""
    proposals: CandidateSet | None = None
    scalings: Mapping[Condition, Scaling] | None = None
    """[K] per condition, at least one; None is an uncalibrated head."""

    def confidence(
        self,
        logits_RK: npt.ArrayLike,
        entropies_RK: npt.ArrayLike,
        sampling: Sequence[SamplingParams],
    ) -> FloatArray:
        """Calibrated conditional confidences c [R, K] of raw logits and the entropies beside them;
        `sampling` is the rows'.

        Blocks cut short take what their positions have.
        """
        if not self.scalings or not sampling:
            return conditional_confidence(logits_RK)
        assert self.proposals is not None
        wanted = [Condition.of(own, self.proposals) for own in sampling]
        rows = Scaling.rows([self.scalings[self.nearest(condition)] for condition in wanted])
        return rows.first(np.shape(logits_RK)[1]).confidence(logits_RK, entropies_RK)

    def nearest(self, wanted: Condition) -> Condition:
        """The condition whose scaling serves the wanted one; the first of equals."""
        assert self.scalings
        if wanted in self.scalings:
            return wanted
        return min(self.scalings, key=wanted.distance)


class Calibration(Protocol):
    """A calibration in service."""

    def expect(self, sampling: SamplingParams) -> None:
        """A request with these parameters will come."""
        ...

    def snapshot(self) -> Snapshot:
        """What the round that starts now is scheduled with."""
        ...

    def observe(self, record: StepRecord, sampling: Mapping[int, SamplingParams]) -> None:
        """Told of every step when it is over; `sampling` is that of its requests, by id."""
        ...


class Uncalibrated:
    """Confidences as the head gives them."""

    def expect(self, sampling: SamplingParams) -> None:
        """Nothing to prepare."""

    def snapshot(self) -> Snapshot:
        return Snapshot(0)

    def observe(self, record: StepRecord, sampling: Mapping[int, SamplingParams]) -> None:
        """Keeps no state."""


class FixedCalibration:
    """What a bundle holds, unchanged.

    say: is told, once a condition, where a request is served with the nearest one's.
    """

    def __init__(
        self,
        scalings: Mapping[Condition, Scaling],
        proposals: CandidateSet,
        *,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        assert scalings
        self._snapshot = Snapshot(0, proposals, dict(scalings))
        self._proposals = proposals
        self._say = say
        self._expected: set[Condition] = set(scalings)

    def expect(self, sampling: SamplingParams) -> None:
        wanted = Condition.of(sampling, self._proposals)
        if wanted not in self._expected:
            self._expected.add(wanted)
            self._say(
                f"calibration: none for {wanted}; using the nearest: "
                f"{self._snapshot.nearest(wanted)}"
            )

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def observe(self, record: StepRecord, sampling: Mapping[int, SamplingParams]) -> None:
        """Keeps no state."""
