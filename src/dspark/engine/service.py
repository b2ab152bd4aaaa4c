"""The engine behind a thread: submit from anywhere, read each request's events at any pace.

    service = EngineService(engine)
    stream = service.submit(prompt, params)      # UserError at once for what cannot run
    for event in stream: ...                     # or: async for event in stream
    stream.cancel()                              # at any moment, from any thread
    service.drain(); service.close()

One thread steps the engine and nobody else touches it (a pipelined engine has its own thread for
texts, and hands events out from there). It puts events into the streams and never
waits for who reads them: what a slow reader has not fetched yet is bounded by its own request's
length.
"""

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from dspark.core.errors import DSparkError
from dspark.core.records import StepRecord
from dspark.core.sampling import SamplingParams
from dspark.engine.engine import Engine
from dspark.engine.request import Request, TokenEvent

logger = logging.getLogger(__name__)

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class ClosedError(DSparkError):
    """The service takes no new requests: it is draining or closed."""


class RequestStream:
    """The events of one submitted request, those of its `n` choices mixed as they come.

    Ends after the last choice's last event, whose `finished` says why: an error or a cancellation
    is an event too, never an exception here. Iterate it in one place, with `for` or `async for`.
    """

    def __init__(self, service: "EngineService", requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        """One a choice, in order; their ids are those in records and events."""
        self._service = service
        self._open = {request.id for request in requests}
        self._events: deque[TokenEvent] = deque()
        self._changed = threading.Condition()
        self._waiters: list[_Waiter] = []

    @property
    def seed(self) -> int:
        """The seed that repeats it: the request's own, or the one that was drawn."""
        return self.requests[0].seed

    @property
    def done(self) -> bool:
        """Every choice has ended, whether or not its events were read."""
        return not self._open

    def cancel(self) -> None:
        """Ends what is still open with "cancelled" events; never waits, may be repeated."""
        self._service.cancel(self)

    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        with self._changed:
            while not self._events and self._open:
                self._changed.wait()
            if not self._events:
                raise StopIteration
            return self._events.popleft()

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        while True:
            with self._changed:
                if self._events:
                    return self._events.popleft()
                if not self._open:
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, future))
            await future

    def _put(self, event: TokenEvent) -> None:
        with self._changed:
            self._events.append(event)
            if event.finished is not None:
                self._open.discard(event.request)
            waiters, self._waiters = self._waiters, []
            self._changed.notify_all()
        for loop, future in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, future)


class EngineService:
    """Runs `engine` in a thread of its own. Every method may be called from any thread.

    on_record: called in the engine's thread with every step's record; the engine keeps none.
    """

    def __init__(
        self, engine: Engine, *, on_record: Callable[[StepRecord], None] | None = None
    ) -> None:
        self.engine = engine
        self._on_record = on_record
        self._changed = threading.Condition()
        self._arrived: list[RequestStream] = []
        self._cancelled: list[RequestStream] = []
        self._streams: dict[int, RequestStream] = {}
        """Open choices, by engine request id."""
        self._accepts = True
        self._closing = False
        engine.writing.deliver = self._hand_out
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        priority: int = 0,
        owner: str = "",
    ) -> RequestStream:
        """Queues all `params.n` choices. Checks and compiles here, in the caller's thread.

        seed: what to draw with where `params` has none; drawn afresh by default.
        priority, owner: as in `Request`.

        Raises UserError for a request that cannot run, OverloadedError if too much is waiting,
        ClosedError while draining or closed.
        """
        if seed is None:
            seed = secrets.randbits(63)
        requests = [
            self.engine.prepare(
                prompt, params, choice=choice, seed=seed, priority=priority, owner=owner
            )
            for choice in range(params.n)
        ]
        stream = RequestStream(self, requests)
        with self._changed:
            if not self._accepts:
                raise ClosedError("the engine is shutting down; it takes no new requests")
            arriving = [request for other in self._arrived for request in other.requests]
            self.engine.check_load([*arriving, *requests])
            self._arrived.append(stream)
            self._streams |= {request.id: stream for request in requests}
            self._changed.notify_all()
        return stream

    def cancel(self, stream: RequestStream) -> None:
        """As `RequestStream.cancel`."""
        with self._changed:
            self._cancelled.append(stream)
            self._changed.notify_all()

    @property
    def alive(self) -> bool:
        """The engine's thread runs."""
        return self._thread.is_alive()

    @property
    def open_choices(self) -> int:
        """Choices that have not ended, waiting ones included."""
        return len(self._streams)

    def drain(self, timeout: float | None = None) -> bool:
        """Refuses new requests and waits for the open ones; False if `timeout` seconds passed."""
        with self._changed:
            self._accepts = False
            return self._changed.wait_for(lambda: not self._streams, timeout)

    def close(self) -> None:
        """Cancels what is open and stops the thread; after `drain`, nothing is. May be repeated."""
        with self._changed:
            self._accepts = False
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "EngineService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                arrived, self._arrived = self._arrived, []
                cancelled, self._cancelled = self._cancelled, []
                closing = self._closing
            for stream in arrived:
                for request in stream.requests:
                    self.engine.enqueue(request)
            ids = {request.id for stream in cancelled for request in stream.requests}
            if ids or closing:
                self._hand_out(self.engine.cancel(None if closing else ids))
            if closing:
                return
            if not self.engine.idle:  # as it may be after a cancellation
                self._hand_out(self._step())

    def _has_work(self) -> bool:
        arrived = self._arrived or self._cancelled or self._closing
        return bool(arrived) or not self.engine.idle

    def _step(self) -> list[TokenEvent]:
        try:
            events = self.engine.step()
        except Exception as error:  # nobody's in particular: all that took part end, none waits on
            logger.exception("a step of the engine failed")
            events = self.engine.fail_running(error)
        records, self.engine.records = self.engine.records, []
        try:
            if self._on_record is not None:
                for record in records:
                    self._on_record(record)
        except Exception:  # whoever only watches must not stop the engine
            logger.exception("on_record failed")
        return events

    def _hand_out(self, events: list[TokenEvent]) -> None:
        for event in events:
            self._streams[event.request]._put(event)
        if any(event.finished is not None for event in events):
            with self._changed:
                for event in events:
                    if event.finished is not None:
                        del self._streams[event.request]
                self._changed.notify_all()


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
