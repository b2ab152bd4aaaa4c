"""From what a step has committed to events with texts: at once, or while the next step computes."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from dspark.core.errors import DSparkError
from dspark.engine.ending import write_texts
from dspark.engine.request import Request, RequestState, TokenEvent

logger = logging.getLogger(__name__)

Unwritten = tuple[RequestState, TokenEvent]
"""An event that may lack the texts of its tokens."""
_Failed = list[tuple[RequestState, Exception]]


class Writing:
    """Pipelined, a thread of its own writes what one step committed while the next one computes.

    It touches a request's writer and nothing else, and nothing that decides about a round waits for
    it: where a stop string is looked for, the step itself has written the text (`ending.walk`). So
    every step is the same as without it. At most one step is behind: `settle` comes before `put`.
    Events stay here until they are taken, so that a step that fails half-way loses none.
    """

    def __init__(self, *, pipelined: bool) -> None:
        self.deliver: Callable[[list[TokenEvent]], None] | None = None
        """Pipelined: takes events in the writing thread, as soon as they are written; without it
        the next `take` returns them."""
        self.steps_behind = 0
        """Counted: steps whose events were written while the engine went on."""
        self._thread = ThreadPoolExecutor(1, "dspark-writing") if pipelined else None
        self._work: Future[tuple[list[TokenEvent], _Failed]] | None = None
        self._ready: list[TokenEvent] = []

    @property
    def behind(self) -> bool:
        """Something was put that was not taken or delivered."""
        return self._work is not None or bool(self._ready)

    def settle(self) -> None:
        """Waits for what is being written.

        What failed there is put down in `RequestState.error`, and ends that request in the step
        that comes.
        """
        work = self._work
        if work is None:
            return
        wait([work])  # Ctrl-C here loses nothing
        self._work = None
        self._keep(*work.result())

    def put(self, unwritten: Sequence[Unwritten]) -> None:
        """Writes texts: now, or where it is pipelined, while the engine goes on."""
        if self._thread is None:
            self._keep(*_write(unwritten))
            return
        assert self._work is None, "settle what is behind first"
        if unwritten:
            self.steps_behind += 1
            self._work = self._thread.submit(self._write_behind, unwritten)

    def take(self) -> list[TokenEvent]:
        """Events that are written and were not delivered; nothing is waited for."""
        events, self._ready = self._ready, []
        return events

    def collect(self) -> list[TokenEvent]:
        """All of them, what is being written included."""
        self.settle()
        return self.take()

    def _keep(self, events: list[TokenEvent], failed: _Failed) -> None:
        self._ready += events
        for state, error in failed:
            state.error = error

    def _write_behind(self, unwritten: Sequence[Unwritten]) -> tuple[list[TokenEvent], _Failed]:
        events, failed = _write(unwritten)
        if self.deliver is None:
            return events, failed
        self.deliver(events)
        return [], failed


def error_event(request: Request, error: Exception) -> TokenEvent:
    """The last event of a request that fails."""
    if not isinstance(error, DSparkError):
        logger.error("request %d failed", request.id, exc_info=error)
        error = DSparkError(f"the request failed: {type(error).__name__}: {error}")
    return TokenEvent(request.id, (), (), "error", request.choice, error=error)


def _write(unwritten: Sequence[Unwritten]) -> tuple[list[TokenEvent], _Failed]:
    events: list[TokenEvent] = []
    failed: _Failed = []
    for state, event in unwritten:
        try:
            events.append(write_texts(state, event))
        except Exception as error:  # a detokeniser's: this request's alone
            if event.finished is None:
                failed.append((state, error))
            else:
                events.append(error_event(state.request, error))
    return events, failed
