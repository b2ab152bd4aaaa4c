"""One request in flight: its events, its deadline, what it is measured by, and how it is let go."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dspark.core.errors import DSparkError, OverloadedError, UserError
from dspark.core.sampling import SamplingParams
from dspark.engine.request import TokenEvent
from dspark.engine.service import ClosedError, RequestStream
from dspark.server.asking import as_bad_request
from dspark.server.errors import ApiError, draining, too_busy
from dspark.server.serving import Serving
from dspark.server.token_details import token_details

_RETRY_SECONDS = 2.0
"""After a refusal because too much waits."""


class Answer:
    """Events of one submitted prompt, with `n` choices.

    Nothing is ever interrupted from outside: a client that left, a deadline and a shutdown all
    cancel the request in the engine, whose last events then end the iteration.
    """

    def __init__(
        self, serving: Serving, stream: RequestStream, prompt: Sequence[int], *, details: bool
    ) -> None:
        self.id = secrets.token_hex(12)
        self.prompt = prompt
        self.completion_tokens = 0
        self._serving = serving
        self._stream = stream
        self._details = details
        self._timed_out = False
        self._started = time.perf_counter()
        self._unfinished = len(stream.requests)
        """Choices whose end has not been seen, and counted, here."""
        self._last: dict[int, float] = {}
        """When each choice's last tokens came."""
        self._alarm = asyncio.get_running_loop().call_later(
            serving.config.request_timeout, self._time_out
        )
        if details:
            for request in stream.requests:
                serving.notes.watch(request.id)

    @property
    def seed(self) -> int:
        return self._stream.seed

    def cancel(self) -> None:
        if not self._stream.done:
            self._stream.cancel()

    def close(self) -> None:
        """Lets go of everything; whatever still runs is cancelled."""
        self._alarm.cancel()
        self.cancel()
        for _ in range(self._unfinished):  # nobody waits for their last events
            self._finished("cancelled", time.perf_counter())
        if self._details:
            for request in self._stream.requests:
                self._serving.notes.forget(request.id)

    async def events(self) -> AsyncIterator[tuple[TokenEvent, list[dict[str, Any]] | None]]:
        """(event, details of its tokens if they were asked for).

        Raises ApiError when the request failed, took too long or was cancelled.
        """
        failure: ApiError | None = None
        async for event in self._stream:
            first = event.choice not in self._last
            self._measure(event)
            if event.finished in ("error", "cancelled"):
                failure = failure or self._failure(event)
                self.cancel()  # one choice without the others is no answer
            if failure is not None:
                continue  # to the last event, so that every choice is counted
            self.completion_tokens += len(event.tokens)
            yield event, self._describe(event, first) if self._details else None
        if failure is not None:
            raise failure

    def _describe(self, event: TokenEvent, first: bool) -> list[dict[str, Any]]:
        return token_details(event, None if first else self._serving.notes.next(event.request))

    def _measure(self, event: TokenEvent) -> None:
        metrics, now = self._serving.metrics, time.perf_counter()
        last = self._last.get(event.choice)
        if event.tokens:
            if last is None:
                metrics.first_token(now - self._started)
            else:
                metrics.next_tokens(now - last, len(event.tokens))
            self._last[event.choice] = now
        if event.finished is not None:
            self._finished("timeout" if self._timed_out else event.finished, now)

    def _finished(self, reason: str, now: float) -> None:
        self._unfinished -= 1
        self._serving.metrics.finished(reason, len(self.prompt), now - self._started)

    def _time_out(self) -> None:
        self._timed_out = True
        self.cancel()

    def _failure(self, event: TokenEvent) -> ApiError:
        if self._timed_out:
            seconds = self._serving.config.request_timeout
            return ApiError(
                504,
                f"the request took longer than {seconds:g} seconds, the limit; ask for less",
                type="server_error",
                code="timeout",
            )
        if event.finished == "error":
            return _engine_error(event.error)
        return draining() if self._serving.draining else ApiError(499, "the client left")


async def ask(
    serving: Serving,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    owner: str,
    details: bool = False,
) -> Answer:
    """Submits a prompt. Raises ApiError for what the engine refuses.

    owner: whose request it is; the engine is fair among owners.
    """
    most = serving.config.max_prompt_tokens
    if most is not None and len(prompt) > most:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens; the limit is {most}",
            param="prompt",
            code="context_length_exceeded",
        )
    try:
        # In a thread: a grammar may take a while to compile, and the others go on meanwhile.
        stream = await asyncio.to_thread(serving.engine.submit, prompt, params, owner=owner)
    except OverloadedError as error:
        raise too_busy(str(error), _RETRY_SECONDS) from None
    except ClosedError:
        raise draining() from None
    except UserError as error:
        raise as_bad_request(error) from None
    return Answer(serving, stream, prompt, details=details)


def _engine_error(error: DSparkError | None) -> ApiError:
    if isinstance(error, UserError):
        return as_bad_request(error)
    return ApiError(500, str(error or "the engine failed"), type="server_error")
