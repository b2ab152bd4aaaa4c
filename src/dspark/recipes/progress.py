"""Progress of long work: a bar on a terminal, a line now and then elsewhere, or nothing."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

Advance = Callable[[int, str], None]
"""advance(done_now, note)"""

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Everything goes to standard error; standard output belongs to results."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(file=sys.stderr)

    def say(self, line: str) -> None:
        if not self.quiet:
            # soft_wrap: lines of a log file are not cut at 80 columns.
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[Advance]:
        if self.quiet:
            yield lambda _done, _note: None
        elif self.console.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(title, total=total, note="")
                yield lambda done, note: bar.update(task, advance=done, note=note)
        else:
            yield self._lines(title, total)

    def _bar(self) -> RichProgress:
        return RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
        )

    def _lines(self, title: str, total: int) -> Advance:
        done, last = 0, time.monotonic()

        def advance(now: int, note: str) -> None:
            nonlocal done, last
            done += now
            if done == total or time.monotonic() - last > _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.say(f"{title}: {done}/{total} {note}")

        return advance
