"""Token ids to text, piece by piece."""

from typing import Any

_BROKEN = "�"


class TextStream:
    """The text of a growing list of tokens. A character that is not whole yet is held back."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, tokens: list[int] | tuple[int, ...]) -> str:
        """The text that `tokens` add, special tokens left out."""
        self._tokens += tokens
        text = self._decode(self._tokens[self._start :])
        if text.endswith(_BROKEN):
            return ""
        piece = text[self._shown :]
        # Decode from a little before the end next time: a token's text may depend on the one before
        # it.
        self._start = max(self._start, len(self._tokens) - 8)
        self._shown = len(self._decode(self._tokens[self._start :]))
        return piece

    def finish(self) -> str:
        """What was held back, whole or not."""
        return self._decode(self._tokens[self._start :])[self._shown :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
