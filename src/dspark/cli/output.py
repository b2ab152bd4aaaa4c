"""What commands print: text for people, errors in one line, one JSON document for scripts."""

import json
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from dspark.core.records import TokenFate

_STYLES: dict[TokenFate, str] = {
    "accepted": "green",
    "corrected": "yellow",
    "bonus": "cyan",
    "plain": "default",
}
_LEGEND: dict[TokenFate, str] = {
    "accepted": "drafted and accepted",
    "corrected": "in place of a rejected one",
    "bonus": "after a whole draft",
    "plain": "without a draft",
}


class Screen:
    """Standard output for people: coloured on a terminal, exact bytes in a pipe or a file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        # Without a terminal rich would wrap lines at 80 columns, so it is not asked at all.
        self._console = (
            Console(file=self._stream, highlight=False) if self._stream.isatty() else None
        )
        self._mid_line = False

    @property
    def interactive(self) -> bool:
        return self._console is not None

    def print(self, text: str = "", *, end: str = "\n") -> None:
        self._write(Text(text), end)

    def token(self, text: str, fate: TokenFate) -> None:
        """Appends a piece of streamed text, coloured by its fate."""
        self._write(Text(text, style=_STYLES[fate]), "")

    def masked(self, text: str, *, trained: bool) -> None:
        """Appends a run of a training text: coloured if it is trained on, [[so]] in a pipe."""
        if self.interactive:
            self._write(Text(text, style="green" if trained else "dim"), "")
        else:
            self.print(f"[[{text}]]" if trained else text, end="")

    def end_line(self) -> None:
        """Goes to a new line, unless at the start of one."""
        if self._mid_line:
            self.print()

    def legend(self) -> None:
        """Says what the colours of `token` mean, where there are any."""
        if self.interactive:
            pieces = [Text(_LEGEND[fate], style=_STYLES[fate]) for fate in _LEGEND]
            self._write(Text("  ").join(pieces), "\n\n")

    def json(self, document: Mapping[str, Any]) -> None:
        """One compact line of its own. NaN and infinity are no JSON and raise ValueError."""
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        self.end_line()
        print(text, file=self._stream, flush=True)

    def _write(self, text: Text, end: str) -> None:
        written = text.plain + end
        if written:
            self._mid_line = not written.endswith("\n")
        if self._console is None:
            print(text.plain, end=end, file=self._stream, flush=True)
        else:
            self._console.print(text, end=end, soft_wrap=True)


def print_note(message: str) -> None:
    """Progress and remarks go to standard error, so that standard output stays the result."""
    print(message, file=sys.stderr, flush=True)


def print_error(message: str) -> None:
    """One line on standard error, whatever the message held."""
    print("error:", " ".join(message.split()), file=sys.stderr, flush=True)
