from typing import Any

import numpy as np
import pytest

from dspark.core.errors import PromptError
from dspark.data.template import encode_prompt, supervised_tokens, template_hash


class Letters:
    """A tokenizer of letters, with or without a chat template."""

    def __init__(self, chat_template: Any) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any:
        assert kwargs == {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return self("".join(f"<{m['role'][0]}>{m['content']}" for m in conversation) + "<a>")


def _text(ids: np.ndarray) -> str:
    return "".join(chr(i) for i in ids)


def test_chat_template_or_plain_text() -> None:
    chat, base = Letters("template"), Letters(None)
    assert _text(encode_prompt(chat, "hi")) == "<u>hi<a>"
    assert _text(encode_prompt(chat, "hi", "be nice")) == "<s>be nice<u>hi<a>"
    assert _text(encode_prompt(base, "hi")) == "hi"
    assert encode_prompt(base, "hi").dtype == np.int32
    with pytest.raises(PromptError, match="empty"):
        encode_prompt(chat, " \n")


def test_template_hash() -> None:
    assert template_hash(Letters(None)) is None
    assert template_hash(Letters("a")) != template_hash(Letters("b"))
    assert template_hash(Letters({"x": "1", "y": "2"})) == template_hash(
        Letters({"y": "2", "x": "1"})
    )


def test_supervised_tokens() -> None:
    assert supervised_tokens(6, [(1, 3), (5, 6)]).tolist() == [
        False,
        True,
        True,
        False,
        False,
        True,
    ]


def test_a_prompt_that_is_not_unicode() -> None:
    """What a shell that is not UTF-8 hands over."""
    with pytest.raises(PromptError, match=r"not valid UTF-8 \(at character 3\)"):
        encode_prompt(Letters(None), "caf\udce9")
