"""Keeps round records for those who asked how their tokens came about."""

import threading
from collections import deque

from dspark.core.records import RoundRecord, StepRecord


class RoundNotes:
    """Records of watched requests, in order: one for each of their events after the first.

    The engine's thread writes a step's records before it hands out that step's events, so whoever
    reads an event finds its record here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, deque[RoundRecord]] = {}

    def observe(self, record: StepRecord) -> None:
        if not self._watched:
            return
        with self._lock:
            for one in record.rounds:
                if one.request in self._watched:
                    self._watched[one.request].append(one)

    def watch(self, request: int) -> None:
        with self._lock:
            self._watched[request] = deque()

    def next(self, request: int) -> RoundRecord | None:
        """The record of the request's next round; None for its first token, of prefill."""
        with self._lock:
            waiting = self._watched.get(request)
            return waiting.popleft() if waiting else None

    def forget(self, request: int) -> None:
        with self._lock:
            self._watched.pop(request, None)
