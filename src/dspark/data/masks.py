"""Which tokens of a written conversation the assistant said, for any chat template.

For responses that come as text (another server's, a dataset's). Where the target wrote them here,
their token ids are known and nothing needs to be found again.

The prompt of an answer is what the template renders up to where the assistant's answer starts
(`add_generation_prompt`), so the answer begins at the end of that text, whatever its own text says:
a header that a user or the answer typed is not taken for one. Characters become tokens by the
tokenizer's offsets. The end-of-turn token is said, too; the line break that a template puts behind
it is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.core.errors import ConfigError, DataError
from dspark.data.anchors import BoolArray
from dspark.data.conversation import Message
from dspark.data.template import TokenIds, extends, supervised_tokens, thinking_option

_MARK = "dsparkmarksananswer"
"""Stands for an answer where a template is asked what it puts around one."""


@dataclass(frozen=True, eq=False, slots=True)
class MaskedText:
    token_ids: TokenIds
    """int32 [T]"""
    supervised: BoolArray
    """bool [T]: the assistant's tokens."""


def mask_conversation(
    tokenizer: Any, messages: Sequence[Message], *, thinking: bool | None = None
) -> list[MaskedText]:
    """The conversation's answers with their masks; usually one text that holds them all.

    A template that renders earlier turns differently once they are past (Qwen3 drops their
    thoughts) gives a text for each answer, since no one text holds what the target saw each time.

    tokenizer: a fast transformers tokenizer with a chat template.
    thinking: `enable_thinking` for templates that know it; None is the template's own default.

    Raises ConfigError where the template or tokenizer cannot do this, DataError where the template
    refuses the conversation or there is no answer in it.
    """
    options = _options(tokenizer, thinking)
    texts: list[MaskedText] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        ids, start = _answer(tokenizer, messages[:index], message, options, ended=True)
        text = MaskedText(ids, supervised_tokens(len(ids), [(start, len(ids))]))
        if texts and extends(text.token_ids, texts[-1].token_ids):
            text.supervised[: len(texts[-1].supervised)] |= texts[-1].supervised
            texts.pop()
        texts.append(text)
    if not texts:
        raise DataError("the conversation has no answer of the assistant")
    return texts


def split_answer(
    tokenizer: Any,
    history: Sequence[Message],
    answer: str,
    *,
    ended: bool,
    thinking: bool | None = None,
) -> tuple[TokenIds, TokenIds]:
    """Token ids of the prompt and of an answer that came as text, as in `mask_conversation`.

    ended: whether the answer ended by itself, so that its end-of-turn token was said, too.
    """
    message: Message = {"role": "assistant", "content": answer}
    ids, start = _answer(tokenizer, history, message, _options(tokenizer, thinking), ended=ended)
    return ids[:start], ids[start:]


def _answer(
    tokenizer: Any,
    history: Sequence[Message],
    message: Message,
    options: dict[str, bool],
    *,
    ended: bool,
) -> tuple[TokenIds, int]:
    """The conversation up to the end of this answer, and where in it the answer starts."""
    prompt = _render(tokenizer, history, options, add_generation_prompt=True)
    before, said, after = _around(tokenizer, history, message, prompt, options)
    encoded = tokenizer(
        prompt + before + said + after, add_special_tokens=False, return_offsets_mapping=True
    )
    start = len(prompt) + len(before)
    special = tokenizer.all_special_ids if ended else []
    first, last = _span(encoded, start, start + len(said), special)
    return np.asarray(encoded["input_ids"][:last], dtype=np.int32), first


def _options(tokenizer: Any, thinking: bool | None) -> dict[str, bool]:
    if tokenizer.chat_template is None or not tokenizer.is_fast:
        raise ConfigError("masks need a fast tokenizer with a chat template; this one is not")
    return thinking_option(tokenizer, thinking)


def _render(
    tokenizer: Any, messages: Sequence[Message], options: dict[str, bool], **kwargs: Any
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, **kwargs, **options)
        )
    except Exception as error:  # templates raise what they like, by way of jinja
        raise DataError(f"the chat template refuses the conversation: {error}") from None


def _around(
    tokenizer: Any,
    history: Sequence[Message],
    answer: Message,
    prompt: str,
    options: dict[str, bool],
) -> tuple[str, str, str]:
    """What the template puts between prompt and answer, the answer as it stands there, the rest.

    The template is asked with a mark in the answer's place, so nothing is searched for in the
    answer itself.
    """
    marked: Message = {"role": "assistant", "content": _MARK}
    rendered = _render(tokenizer, [*history, marked], options)
    head, found, after = rendered.partition(_MARK)
    if not found or _MARK in prompt:
        raise ConfigError("the chat template does not show the assistant's answer as it was given")
    between = head.removeprefix(prompt) if head.startswith(prompt) else ""
    if between.strip():  # an empty thought, which nobody said
        given = _render(tokenizer, [*history, answer], options)
        # An answer that brings its own thought replaces it.
        if given.startswith(prompt + answer["content"]):
            return "", answer["content"], after
        return between, answer["content"], after
    return "", between + answer["content"], after  # Mistral's blank belongs to the first word


def _span(encoded: Any, start: int, end: int, special: Sequence[int]) -> tuple[int, int]:
    """Tokens of the characters [start, end), and the special token behind them.

    A token that begins before `start` is the prompt's; one that ends behind `end` is not said as it
    stands, and so left out.
    """
    offsets = encoded["offset_mapping"]
    first = next((i for i, (a, b) in enumerate(offsets) if a >= start and b > a), len(offsets))
    last = first
    while last < len(offsets) and offsets[last][1] <= end:
        last += 1
    if last == first:
        raise DataError("an answer of the assistant has no token of its own")
    if last < len(offsets) and offsets[last][0] >= end and encoded["input_ids"][last] in special:
        last += 1
    return first, last
