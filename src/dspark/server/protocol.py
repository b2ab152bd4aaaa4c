"""uvicorn's HTTP/1.1, with an end to what a client may leave unsaid."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 1024


class PatientProtocol(HttpToolsProtocol):
    """Closes a connection whose request's head does not come in time, or does not end.

    It has as long as an idle connection between two requests (`timeout_keep_alive`). The body has
    its own limits (`server.wrapping`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._alarm: asyncio.TimerHandle | None = None
        self._between = True
        """No request is under way: what comes next is a head."""
        self._head_bytes: int | None = None
        """Received of the head that is awaited."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._between and self._head_bytes is None:
            self._expect_head()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MOST_HEAD_BYTES:
            self.send_400_response(f"The head is larger than {MOST_HEAD_BYTES} bytes, the limit.")

    def on_headers_complete(self) -> None:
        self._between = False
        self._head_done()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._between = True
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._alarm = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _head_done(self) -> None:
        self._head_bytes = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
