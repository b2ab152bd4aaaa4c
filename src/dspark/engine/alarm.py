"""The alarm of DESIGN decision 13: an accepted length that stays near 1."""

from collections import deque

from dspark.core.records import StepRecord

ROUNDS = 200
LEAST_ACCEPTED_LENGTH = 1.05


class AcceptanceAlarm:
    """Warns, once, when the last 200 drafted rounds accepted next to nothing.

    That is the mark of a drafter read under the wrong slot or layer convention, or trained for
    another model or chat template; text alone would not show it, because verification keeps the
    output right.
    """

    def __init__(self) -> None:
        self._emitted: deque[int] = deque(maxlen=ROUNDS)
        self._rung = False

    def observe(self, record: StepRecord) -> str | None:
        """The warning, the first time that one is due."""
        # A text may end where nothing fits. But what was accepted counts in its last round, too: of
        # short texts under short drafts, all but the rejected rounds are the last ones.
        judged = (r for r in record.rounds if r.admitted and (r.accepted or not r.ended))
        self._emitted.extend(r.accepted + 1 for r in judged)
        if self._rung or len(self._emitted) < ROUNDS:
            return None
        accepted_length = sum(self._emitted) / ROUNDS
        if accepted_length >= LEAST_ACCEPTED_LENGTH:
            return None
        self._rung = True
        return (
            f"accepted length is {accepted_length:.3f} over the last {ROUNDS} rounds: the drafter "
            f"does not fit what it is used for. Check that it was trained for this target, chat "
            f"template and slot convention, or run with --policy off"
        )
