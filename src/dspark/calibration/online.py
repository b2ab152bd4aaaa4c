"""A calibration that follows what is served.

Served texts differ from those a drafter was calibrated on. Every verified position says how well
its confidence was calibrated: rounds go into a sliding window a condition, and where the window
shows more error than a perfect predictor would, the scaling is fitted again: temperatures and
offsets, while entropy keeps the weight that the bundle gives it. A refit reads finished rounds
only, so it never anticipates (law 2), and a round keeps the snapshot that it began with.

A policy verifies where it expects acceptance, so the window holds mostly that; rounds verified
whole without looking at their confidences (`scheduling.probing`) show the rest.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dspark.calibration.condition import CandidateSet, Condition
from dspark.calibration.confidence import Scaling
from dspark.calibration.metrics import expected_calibration_error, floor_of_ece
from dspark.calibration.samples import Rounds
from dspark.calibration.scaling import fit_scaling, survival
from dspark.calibration.serving import Snapshot
from dspark.calibration.window import Window
from dspark.core.records import StepRecord
from dspark.core.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig:
    window: int = 20_000
    """Rounds that are looked at: the last so many. No refit before there are as many."""
    every: int = 2_000
    """Rounds between two looks."""
    margin: float = 0.01
    """Drift is an ECE this much above a perfect predictor's 95th percentile."""
    step: float = 1.5
    """A refit changes a temperature at most by this factor."""
    reach: float = 4.0
    """All refits together change it at most by this factor."""
    offset_step: float = 0.5
    """A refit moves an offset at most so far, in logits."""
    offset_reach: float = 2.0
    """All refits together move it at most so far."""
    least: int = 1_000
    """Verified rounds in the window that a position needs to be refitted."""
    conditions: int = 32
    """Conditions followed at once, each with a window: 1.4 MB when full, for blocks of 7."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refit:
    """One change of the calibration while serving."""

    number: int
    """Of the snapshot that it made (`StepRecord.calibration`)."""
    condition: Condition
    rounds: int
    """Rounds of the condition seen by then."""
    drifted: tuple[int, ...]
    """Positions, from 1, that gave rise to it."""
    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    mean_ece_before: float
    """Over the positions refitted, in the window."""
    mean_ece_after: float


class OnlineCalibration:
    """A `Calibration` that begins with a bundle's scalings and refits them by condition.

    Clients choose temperatures and truncation, so there is no end of conditions: one too many takes
    the place of the one that was used longest ago, whose rounds and refits are dropped.

    scalings: the bundle's; empty for an uncalibrated head.
    say: is told of every refit, and of conditions served with the nearest one's.
    """

    def __init__(
        self,
        scalings: Mapping[Condition, Scaling],
        proposals: CandidateSet,
        block_size: int,
        *,
        config: OnlineConfig | None = None,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.config = config or OnlineConfig()
        self.refits: list[Refit] = []
        self.dropped = 0
        """Conditions that gave way to others."""
        self._bundle = dict(scalings)
        self._snapshot = Snapshot(0, proposals, dict(scalings))
        self._proposals = proposals
        self._block_size = block_size
        self._windows: OrderedDict[Condition, Window] = OrderedDict()
        self._base: dict[Condition, Scaling] = {}
        self._say = say

    def expect(self, sampling: SamplingParams) -> None:
        self._window(Condition.of(sampling, self._proposals))

    def _window(self, wanted: Condition) -> Window:
        """The condition's window, which makes it the one used last."""
        if wanted in self._windows:
            self._windows.move_to_end(wanted)
            return self._windows[wanted]
        if len(self._windows) == self.config.conditions:
            self._drop()
        window = self._windows[wanted] = Window(self.config.window, self._block_size)
        base = Scaling.identity(self._block_size)
        if self._bundle:
            nearest = Snapshot(0, self._proposals, self._bundle).nearest(wanted)
            base = self._bundle[nearest]
            if nearest != wanted:
                self._say(f"calibration: none for {wanted}; using the nearest: {nearest}")
        self._base[wanted] = base
        # From here on it has a scaling of its own: what other conditions see must not move it.
        own = {**(self._snapshot.scalings or {}), wanted: base}
        self._snapshot = replace(self._snapshot, scalings=own)
        return window

    def _drop(self) -> None:
        """Forgets the condition used longest ago; one of the bundle's begins with the bundle's
        scaling again."""
        condition, _ = self._windows.popitem(last=False)
        del self._base[condition]
        kept = {own: it for own, it in (self._snapshot.scalings or {}).items() if own != condition}
        if condition in self._bundle:
            kept[condition] = self._bundle[condition]
        self._snapshot = replace(self._snapshot, scalings=kept)
        if self.dropped == 0:
            self._say(
                f"calibration: {self.config.conditions} conditions are followed, no more: from now "
                f"on the one used longest ago gives way, now {condition}"
            )
        self.dropped += 1

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def observe(self, record: StepRecord, sampling: Mapping[int, SamplingParams]) -> None:
        for own in record.rounds:
            if own.judged and own.confidence:
                condition = Condition.of(sampling[own.request], self._proposals)
                window = self._window(condition)
                window.add(own)
                if window.full and window.seen % self.config.every == 0:
                    self._review(condition, window)

    def _review(self, condition: Condition, window: Window) -> None:
        """Looks for drift, and refits the positions that enough rounds verified."""
        rounds = window.rounds()
        # Verified positions are prefixes, so those with enough rounds are the first ones.
        depth = sum(count >= self.config.least for count in rounds.samples)
        if depth == 0:
            return
        assert self._snapshot.scalings is not None, "expected conditions are there"
        current = self._snapshot.scalings[condition]
        part = rounds.first(depth)
        drifted = self._drifted(part, current.first(depth))
        if not drifted:
            return
        bounds = self._bounds(current.first(depth), self._base[condition].first(depth))
        fitted = current.with_first(fit_scaling(part, *bounds))
        before, after = (_mean_ece(part, own.first(depth)) for own in (current, fitted))
        if not after < before:
            return
        number = self._snapshot.number + 1
        known = self._snapshot.scalings or {}
        self._snapshot = Snapshot(number, self._proposals, {**known, condition: fitted})
        self.refits.append(
            Refit(
                number=number,
                condition=condition,
                rounds=window.seen,
                drifted=drifted,
                temperatures=tuple(fitted.temperatures.tolist()),
                offsets=tuple(fitted.offsets.tolist()),
                mean_ece_before=before,
                mean_ece_after=after,
            )
        )
        self._say(
            f"calibration drifted at positions {[*drifted]} ({condition}): refitted, mean "
            f"ECE {before:.1%} to {after:.1%} over the last {len(rounds)} rounds"
        )

    def _bounds(self, current: Scaling, base: Scaling) -> tuple[Scaling, Scaling]:
        """What a refit may make of the current scaling, at least and at most."""
        own = self.config
        temperatures, offsets = current.temperatures, current.offsets
        weights = current.entropy_weights
        return (
            Scaling(
                np.maximum(temperatures / own.step, base.temperatures / own.reach),
                np.maximum(offsets - own.offset_step, base.offsets - own.offset_reach),
                weights,
            ),
            Scaling(
                np.minimum(temperatures * own.step, base.temperatures * own.reach),
                np.minimum(offsets + own.offset_step, base.offsets + own.offset_reach),
                weights,
            ),
        )

    def _drifted(self, rounds: Rounds, scaling: Scaling) -> tuple[int, ...]:
        predictions_NK = survival(rounds, scaling)
        # The same draws each time: a look is a function of its window.
        generator = np.random.default_rng(0)
        positions = []
        for column in range(rounds.block_size):
            counted = rounds.counted(column)
            predictions, labels = predictions_NK[counted, column], rounds.labels(column)[counted]
            floor = np.quantile(floor_of_ece(predictions, generator, draws=20), 0.95)
            error = expected_calibration_error(predictions, labels)
            if error > floor + self.config.margin:
                positions.append(column + 1)
        return tuple(positions)


def _mean_ece(rounds: Rounds, scaling: Scaling) -> float:
    predictions_NK = survival(rounds, scaling)
    errors = [
        expected_calibration_error(
            predictions_NK[rounds.counted(column), column],
            rounds.labels(column)[rounds.counted(column)],
        )
        for column in range(rounds.block_size)
    ]
    return float(np.mean(errors))
