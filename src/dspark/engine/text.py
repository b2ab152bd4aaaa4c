"""Token ids to text, piece by piece, up to a stop string."""

from collections.abc import Sequence
from typing import Any

_BROKEN = "�"
_CONTEXT = 8
"""Tokens decoded again at least: a token's text may depend on the ones before it."""


class TextStream:
    """The text of a growing list of tokens. A character that is not whole yet is held back.

    The pieces add up to the tokens' text, special tokens left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        """Where decoding starts: always between two characters, or the first would be broken."""
        self._shown = 0
        """Characters of the text from `_start` on that were handed out."""
        self._boundaries: list[int] = []
        """Token counts behind `_start` at which the text ended with a whole character."""

    def push(self, tokens: list[int] | tuple[int, ...]) -> str:
        """The text that `tokens` add and that is complete."""
        self._tokens += tokens
        text = self._decode()
        if text.endswith(_BROKEN):
            return ""
        piece = text[self._shown :]
        self._boundaries.append(len(self._tokens))
        while self._boundaries and self._boundaries[0] <= len(self._tokens) - _CONTEXT:
            self._start = self._boundaries.pop(0)
        self._shown = len(self._decode())
        return piece

    def finish(self) -> str:
        """What was held back, whole or not."""
        return self._decode()[self._shown :]

    def _decode(self) -> str:
        # Cleaning up would take back spaces that were handed out already.
        text: str = self._tokenizer.decode(
            self._tokens[self._start :],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return text


class OutputText:
    """A request's text with its stop strings: what may be the beginning of one is held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), *, include_stop: bool) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""

    def push(self, token: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that `token` adds, and the stop string that it completes, if any.

        may_stop: stop strings that are complete with this token count (`min_tokens`).
        """
        return self._add(self._stream.push((token,)), may_stop)

    def finish(self) -> str:
        """What was held back."""
        text, stop = self._add(self._stream.finish(), may_stop=True)
        return text if stop is not None else text + self._held

    def _add(self, piece: str, may_stop: bool) -> tuple[str, str | None]:
        text, new = self._held + piece, len(self._held)
        if may_stop and (found := self._first_stop(text, new)) is not None:
            start, end, stop = found
            self._held = ""
            return text[: end if self._include_stop else start], stop
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def _first_stop(self, text: str, new: int) -> tuple[int, int, str] | None:
        """(start, end, stop string) of the first one complete with a character from `new` on."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, new - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        end, start, stop = min(found)
        return start, end, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with, itself excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
