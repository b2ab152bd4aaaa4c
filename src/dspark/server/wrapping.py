"""What every request passes on its way in and out: an id, a size limit, headers, a log line.

Plain ASGI: a function call per message, so that streaming costs nothing extra.
"""

import asyncio
import logging
import re
import secrets
import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.server.errors import ApiError, http_answer, json_response
from dspark.server.logs import log, logger
from dspark.server.metrics import ServerMetrics

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/stats", "page"})
"""Asked every few seconds by machines: logged only when they fail."""

_SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]


class TooLarge(HTTPException):
    """FastAPI lets only its own kind of exception pass while it reads a body."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            413,
            f"the body is larger than {limit} bytes, the limit; send less",
            {"Connection": "close"},
        )


class TooSlow(HTTPException):
    def __init__(self, seconds: float) -> None:
        super().__init__(
            408,
            f"nothing of the body came for {seconds:g} seconds, the limit; send it again",
            {"Connection": "close"},
        )


class Wrapping:
    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        receive_timeout: float,
        metrics: ServerMetrics,
    ) -> None:
        self._app = app
        self._max_body = max_body_bytes
        self._receive_timeout = receive_timeout
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        # A given id is repeated in a header and a log: nothing but harmless characters.
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8).encode()
        fields = scope.setdefault("state", {}).setdefault("log", {})
        scope["state"]["request_id"] = request_id.decode()
        started, status = time.perf_counter(), 499  # nginx's: the client left before an answer
        received, whole = 0, False

        async def limited_receive() -> Message:
            nonlocal received, whole
            if whole:  # what is waited for now is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout(self._receive_timeout):
                    message = await receive()
            except TimeoutError:
                raise TooSlow(self._receive_timeout) from None
            received += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if received > self._max_body:
                raise TooLarge(self._max_body)
            return message

        async def marked_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"], (b"x-request-id", request_id), *_SECURITY,
                ]  # fmt: skip
            await send(message)

        try:
            if _declared_length(headers) > self._max_body:
                raise TooLarge(self._max_body)
            await self._app(scope, limited_receive, marked_send)
        except (TooLarge, TooSlow) as error:
            await http_answer(error)(scope, receive, marked_send)
        except Exception:
            logger.exception("failed", extra={"fields": {"request": request_id.decode()}})
            if status != 499:
                raise  # the answer has started: uvicorn closes the connection
            failed = ApiError(
                500,
                f"the server failed; its log has the reason under request {request_id.decode()}",
                type="server_error",
            )
            await json_response(failed.to_json(), 500)(scope, receive, marked_send)
        finally:
            # A label of few values: whatever else is asked for is a file of the page, or nothing.
            route = getattr(scope.get("route"), "path", "page" if status < 400 else "unknown")
            self._metrics.answered(route, status)
            if route not in _QUIET_PATHS or status >= 400:
                log(
                    "request",
                    logging.INFO if status < 500 else logging.ERROR,
                    request=request_id.decode(),
                    method=scope["method"],
                    path=route,
                    status=status,
                    seconds=round(time.perf_counter() - started, 4),
                    **fields,
                )


def _declared_length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() and len(text) < 20 else 0
