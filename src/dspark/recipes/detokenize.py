"""Token ids to text, piece by piece."""

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
