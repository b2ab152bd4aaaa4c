"""The last minutes of a server, small enough to send every second: what the live page draws."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dspark.core.records import RoundRecord, StepRecord
from dspark.server.reliability import Reliability, conditional

SECONDS_KEPT = 300
STEPS_KEPT = 96


@dataclass(slots=True)
class _Second:
    second: int
    steps: int = 0
    rounds: int = 0
    emitted: int = 0
    accepted: int = 0
    verified: int = 0
    prefill: int = 0
    batch: int = 0

    def row(self) -> list[int]:
        return [
            self.second, self.steps, self.rounds, self.emitted, self.accepted, self.verified,
            self.prefill, self.batch,
        ]  # fmt: skip


SECOND_COLUMNS = (
    "second", "steps", "rounds", "emitted", "accepted", "verified", "prefill", "batch",
)  # fmt: skip


@dataclass(slots=True)
class _Totals:
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    offered_at: list[int] = field(default_factory=list)
    """By position: rounds that verified it and had accepted all before it."""
    accepted_at: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Rounds with 0, 1, 2 ... accepted draft tokens, among those that verified some."""


class LiveView:
    """`observe` runs on the engine's thread, `document` on the server's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._seconds: deque[_Second] = deque(maxlen=SECONDS_KEPT)
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS_KEPT)
        self._totals = _Totals()
        self._reliability = Reliability()

    def observe(self, record: StepRecord) -> None:
        with self._lock:
            now = self._clock() - self._started
            second = int(now)
            if not self._seconds or self._seconds[-1].second != second:
                self._seconds.append(_Second(second))
            row = self._seconds[-1]
            row.steps += 1
            row.batch += record.batch_tokens
            row.prefill += record.prefill_tokens
            for one in record.rounds:
                row.rounds += 1
                row.emitted += one.emitted
                row.accepted += one.accepted
                row.verified += one.admitted
                self._add(one)
            self._steps.append(_step(record, now))

    def document(self) -> dict[str, Any]:
        """JSON for the page. Times are seconds since the server started."""
        with self._lock:
            totals = self._totals
            return {
                "now": round(self._clock() - self._started, 3),
                "columns": SECOND_COLUMNS,
                "seconds": [second.row() for second in self._seconds],
                "steps": [*self._steps],
                "totals": {
                    "rounds": totals.rounds,
                    "drafted": totals.drafted,
                    "verified": totals.verified,
                    "accepted": totals.accepted,
                    "emitted": totals.emitted,
                },
                "positions": [
                    {"offered": offered, "accepted": accepted}
                    for offered, accepted in zip(totals.offered_at, totals.accepted_at, strict=True)
                ],
                "lengths": [*totals.lengths],
                "reliability": self._reliability.rows(),
            }

    def _add(self, one: RoundRecord) -> None:
        totals = self._totals
        totals.rounds += 1
        totals.drafted += one.proposed
        totals.verified += one.admitted
        totals.accepted += one.accepted
        totals.emitted += one.emitted
        if one.admitted:
            _grow(totals.lengths, one.accepted + 1)
            totals.lengths[one.accepted] += 1
        decided = min(one.accepted + 1, one.judged)  # up to the first rejection
        _grow(totals.offered_at, decided)
        _grow(totals.accepted_at, decided)
        for position in range(decided):
            accepted = position < one.accepted
            totals.offered_at[position] += 1
            totals.accepted_at[position] += accepted
            if position < len(one.survival):
                self._reliability.add(conditional(one.survival, position), accepted)


def _step(record: StepRecord, now: float) -> dict[str, Any]:
    return {
        "step": record.step,
        "at": round(now, 3),
        "batch": record.batch_tokens,
        "prefill": record.prefill_tokens,
        "rounds": len(record.rounds),
        "verified": sum(one.admitted for one in record.rounds),
        "emitted": sum(one.emitted for one in record.rounds),
        "seconds": {phase: round(seconds, 5) for phase, seconds in record.seconds.items()},
    }


def _grow(values: list[int], length: int) -> None:
    values.extend([0] * (length - len(values)))
