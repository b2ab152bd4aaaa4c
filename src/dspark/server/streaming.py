"""Answers as server-sent events, and clients that leave."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark.server.answer import Answer
from dspark.server.errors import ApiError

_GRACE = 10.0
"""Seconds beyond the request's own deadline for a client that does not read."""
DONE = b"data: [DONE]\n\n"


def event_bytes(document: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


@contextlib.contextmanager
def cancelled_if_client_leaves(receive: Receive, answers: Sequence[Answer]) -> Iterator[None]:
    """Cancels the answers in the engine when the client closes its connection; closes them at the
    end in any case."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for answer in answers:
            answer.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        for answer in answers:
            answer.close()


class EventStream(Response):
    """Sends a stream of chunks. An ApiError in its middle becomes an event of its own."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        answers: Sequence[Answer],
        *,
        seconds: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._answers = answers
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with cancelled_if_client_leaves(receive, self._answers):
                # A reader that has stopped reading must not hold its place for ever.
                async with asyncio.timeout(self._seconds + _GRACE):
                    await self._send(send)
        except OSError:  # the client is gone, a TimeoutError included: nobody to tell
            pass

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:
            body = event_bytes(error.to_json())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def merged(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Any, Any]]:
    """(index of the answer, event, details) of all answers, as they come."""
    if len(answers) == 1:
        async for event, details in answers[0].events():
            yield 0, event, details
        return
    queue: asyncio.Queue[tuple[int, Any, Any] | BaseException | None] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for event, details in answers[index].events():
                queue.put_nowait((index, event, details))
            queue.put_nowait(None)
        except Exception as error:  # anything else is a bug, and must not leave the reader waiting
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(answers))]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
