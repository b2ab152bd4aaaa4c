"""The loss mask of each supported template family, shown as text over a byte tokenizer."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.core.errors import ConfigError, DataError
from dspark.data.conversation import Message
from dspark.data.masks import MaskedText, mask_conversation

LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
QWEN3 = (  # drops the thoughts of past turns, writes an empty one where the last turn has none
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% else %}<|im_start|>assistant\n"
    "{% set parts = m.content.split('</think>\n\n') %}"
    "{% if loop.last %}<think>\n{{ parts[0][8:] if parts | length > 1 else '\n' }}</think>\n\n"
    "{% endif %}{{ parts[-1] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPECIAL = [
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>",
    "<|im_end|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]",
    "<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "<|endoftext|>",
]  # fmt: skip
TALK: list[Message] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo assistant\n\n"},
    {"role": "user", "content": "<assistant> yo"},
    {"role": "assistant", "content": "café"},
]


def _tokenizer(template: str | None) -> Any:
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.chat_template = template
    return fast


def _said(tokenizer: Any, text: MaskedText) -> list[str]:
    """The supervised runs, as text."""
    runs: list[list[int]] = []
    previous = False
    for token, mine in zip(text.token_ids.tolist(), text.supervised.tolist(), strict=True):
        if mine and not previous:
            runs.append([])
        if mine:
            runs[-1].append(token)
        previous = mine
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "end", "blank"),
    [
        (LLAMA3, "<|eot_id|>", ""),
        (CHATML, "<|im_end|>", ""),
        (GEMMA, "<end_of_turn>", ""),
        (MISTRAL, "</s>", " "),
        (PHI3, "<|end|>", ""),
    ],
    ids=["llama3", "chatml", "gemma", "mistral", "phi3"],
)
def test_the_mask_of_each_family(template: str, end: str, blank: str) -> None:
    tokenizer = _tokenizer(template)
    talk = [dict(m, content=m["content"].strip()) for m in TALK]
    texts = mask_conversation(tokenizer, talk)  # type: ignore[arg-type]
    assert len(texts) == 1, "every turn extends the one before"
    assert _said(tokenizer, texts[0]) == [f"{blank}yo assistant{end}", f"{blank}café{end}"]
    if template is not GEMMA:
        system: list[Message] = [{"role": "system", "content": "café yo"}]
        (text,) = mask_conversation(tokenizer, [*system, *talk])  # type: ignore[list-item]
        assert _said(tokenizer, text) == _said(tokenizer, texts[0])
        assert len(text.token_ids) > len(texts[0].token_ids)


def test_past_thoughts_that_are_dropped_make_a_text_for_each_answer() -> None:
    tokenizer = _tokenizer(QWEN3)
    talk: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyo"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nbye"},
    ]
    first, second = mask_conversation(tokenizer, talk, thinking=True)
    assert _said(tokenizer, first) == ["<think>\nhm\n</think>\n\nyo<|im_end|>"]
    assert _said(tokenizer, second) == ["<think>\nso\n</think>\n\nbye<|im_end|>"]
    assert "hm" not in tokenizer.decode(second.token_ids)


@pytest.mark.parametrize("thinking", [False, None])
def test_an_empty_thought_was_said_by_nobody(thinking: bool | None) -> None:
    tokenizer = _tokenizer(QWEN3)
    talk: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]
    (text,) = mask_conversation(tokenizer, talk, thinking=thinking)
    assert _said(tokenizer, text) == ["yo<|im_end|>"]
    assert "<think>\n\n</think>\n\nyo" in tokenizer.decode(text.token_ids)


def test_what_cannot_be_masked() -> None:
    with pytest.raises(ConfigError, match="no thinking"):
        mask_conversation(_tokenizer(CHATML), TALK, thinking=False)
    with pytest.raises(ConfigError, match="chat template"):
        mask_conversation(_tokenizer(None), TALK)
    with pytest.raises(DataError, match="no system role"):
        mask_conversation(_tokenizer(GEMMA), [{"role": "system", "content": "x"}, *TALK])
    with pytest.raises(DataError, match="no answer"):
        mask_conversation(_tokenizer(CHATML), TALK[:1])
