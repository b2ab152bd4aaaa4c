"""Log-probabilities in OpenAI's two shapes, and the text of single tokens."""

from collections.abc import Sequence
from typing import Any

from dspark.core.records import TokenLogprob
from dspark.server.serving import Serving

_BROKEN = "\ufffd"


def token_text(serving: Serving, token: int) -> str:
    """A token's own text; its raw name where it is a part of a character only.

    Raw names keep such tokens apart: evaluation harnesses use the texts as keys.
    """
    text = serving.token_texts.get(token)
    if text is None:
        text = serving.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if not text or _BROKEN in text:
            text = str(serving.tokenizer.convert_ids_to_tokens(token) or f"<{token}>")
        serving.token_texts[token] = text
    return text


def chat_logprobs(serving: Serving, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(serving, token)
        return {"token": text, "logprob": finite(logprob), "bytes": [*text.encode()]}

    return {
        "content": [
            {
                **entry(one.token, one.logprob),
                "top_logprobs": [entry(token, value) for token, value in one.top],
            }
            for one in logprobs
        ]
    }


class CompletionLogprobs:
    """The completions API's four parallel lists, with text offsets that go on from piece to
    piece."""

    def __init__(self, serving: Serving, offset: int = 0) -> None:
        self._serving = serving
        self._offset = offset

    def lists(
        self, logprobs: Sequence[TokenLogprob | None], tokens: Sequence[int]
    ) -> dict[str, Any]:
        """`None`: a prompt's first token, which nothing comes before."""
        texts = [token_text(self._serving, token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else finite(one.logprob) for one in logprobs],
            "top_logprobs": [None if one is None else self._top(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        top = {token_text(self._serving, token): finite(value) for token, value in one.top}
        # The token itself is always there, as in OpenAI's answers.
        return top | {token_text(self._serving, one.token): finite(one.logprob)}


def finite(logprob: float) -> float:
    """JSON has no infinity: an impossible token has OpenAI's -9999."""
    return max(logprob, -9999.0)
