"""From turns to token ids with the target's own chat template, and back to what is supervised.

The tokenizer is an argument (a transformers tokenizer, or anything with the few members used here),
so this room needs no transformers.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dspark.core.errors import ConfigError, PromptError

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


def encode_messages(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    thinking: bool | None = None,
) -> list[int]:
    """Token ids of a conversation in OpenAI's shape, up to where the assistant's answer starts.

    thinking: as in `thinking_option`.

    Without a chat template: the contents, a blank line between them. PromptError when nothing is
    asked, when a text is not valid Unicode, or when the template refuses the conversation.
    """
    contents = [str(message.get("content") or "") for message in messages]
    if not any(content.strip() for content in contents):
        raise PromptError("the conversation is empty; give it some text")
    for content in contents:
        check_text(content)
    option = thinking_option(tokenizer, thinking)
    if tokenizer.chat_template is None:
        encoded = tokenizer("\n\n".join(contents))["input_ids"]
    else:
        try:
            encoded = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **option,
            )["input_ids"]
        except Exception as error:  # jinja2's, or whatever a template's own code meets
            raise PromptError(f"the chat template refuses this conversation: {error}") from None
    return [int(token) for token in encoded]


def thinking_option(tokenizer: ChatTokenizer, thinking: bool | None) -> dict[str, bool]:
    """What the template is told of thinking: nothing for None, which is its own default.

    ConfigError for a template that knows no thinking.
    """
    if thinking is None:
        return {}
    if "enable_thinking" not in str(tokenizer.chat_template):
        raise ConfigError("this chat template has no thinking to switch on or off")
    return {"enable_thinking": thinking}


def takes_tools(tokenizer: ChatTokenizer) -> bool:
    """Whether the chat template looks at `tools`."""
    template = tokenizer.chat_template
    texts = [template] if isinstance(template, str) else [*(template or {}).values()]
    return any("tools" in text for text in texts)


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


def extends(later: TokenIds, earlier: TokenIds) -> bool:
    """Whether a text goes on from another, token by token."""
    return np.array_equal(later[: len(earlier)], earlier)


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
