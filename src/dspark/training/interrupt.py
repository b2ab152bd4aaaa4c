"""Ctrl-C between steps instead of anywhere."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted and waits for the end of the step; a second one is not patient."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed: list[bool] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)
