"""From turns to token ids with the target's own chat template, and back to what is supervised.

The tokenizer is an argument (a transformers tokenizer, or anything with the few members used here),
so this room needs no transformers.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dspark.core.errors import PromptError

TokenIds = npt.NDArray[np.int32]


class ChatTokenizer(Protocol):
    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def __call__(self, text: str) -> Any: ...


def encode_prompt(tokenizer: ChatTokenizer, turn: str, system: str | None = None) -> TokenIds:
    """Token ids [T] of one user turn, up to where the assistant's answer starts.

    A tokenizer without a chat template (a base model) gets the plain text. PromptError when empty
    or not valid Unicode.
    """
    if not turn.strip():
        raise PromptError("the prompt is empty; give it some text")
    check_text(turn)
    if tokenizer.chat_template is None:
        text = turn if system is None else f"{system}\n\n{turn}"
        encoded = tokenizer(text)["input_ids"]
    else:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": turn})
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    return np.asarray(encoded, dtype=np.int32).reshape(-1)


def check_text(prompt: str) -> None:
    """PromptError for what no tokenizer takes: halves of characters, which a command line that is
    not UTF-8 leaves in a string."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid UTF-8 (at character {error.start})") from None


def template_hash(tokenizer: ChatTokenizer) -> str | None:
    """sha256 of the chat template's text; None without one. A drafter is tied to its template."""
    template = tokenizer.chat_template
    if template is None:
        return None
    text = template if isinstance(template, str) else repr(sorted(template.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def supervised_tokens(length: int, responses: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """bool [length]: True at tokens the target wrote, given as (start, end) token offsets.

    A response's end-of-turn token is part of it. Offsets come from token ids, never from searching
    the text for a header that a user may have typed too.
    """
    mask = np.zeros(length, dtype=np.bool_)
    for start, end in responses:
        assert 0 < start <= end <= length, (start, end, length)
        mask[start:end] = True
    return mask
