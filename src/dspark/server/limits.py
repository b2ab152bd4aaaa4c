"""How much one key may ask at a time and in a minute."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dspark.server.errors import too_busy

_RETRY_SECONDS = 1.0


@dataclass(slots=True)
class _Usage:
    allowance: float
    """Requests that may start now: refills with time, up to a minute's worth."""
    seen: float
    running: int = 0


class KeyLimits:
    """A token bucket and a count of running requests for every key. Used on one event loop."""

    def __init__(
        self,
        *,
        requests_per_minute: int = 0,
        concurrent_requests: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = requests_per_minute
        self._concurrent = concurrent_requests
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    @contextmanager
    def request(self, holder: str) -> Iterator[None]:
        """Counts one request for as long as it lasts. Raises ApiError 429 over a limit."""
        usage = self._refilled(holder)
        if self._concurrent and usage.running >= self._concurrent:
            raise too_busy(
                f"this key already has {usage.running} requests running, its limit; wait for one",
                _RETRY_SECONDS,
            )
        if self._per_minute:
            if usage.allowance < 1.0:
                wait = (1.0 - usage.allowance) * 60.0 / self._per_minute
                raise too_busy(
                    f"this key may start {self._per_minute} requests a minute; slow down", wait
                )
            usage.allowance -= 1.0
        usage.running += 1
        try:
            yield
        finally:
            usage.running -= 1

    def _refilled(self, holder: str) -> _Usage:
        now = self._clock()
        usage = self._usage.setdefault(holder, _Usage(float(self._per_minute), now))
        earned = (now - usage.seen) * self._per_minute / 60.0
        usage.allowance = min(float(self._per_minute), usage.allowance + earned)
        usage.seen = now
        return usage
