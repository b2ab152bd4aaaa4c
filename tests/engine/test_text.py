"""Streamed text: whole characters only, and nothing lost or doubled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark.engine.text import TextStream

BROKEN = "\ufffd"
TEXT = st.text(
    st.sampled_from("ab .\n") | st.characters(codec="utf-8", exclude_categories=["Cs"]),
    max_size=40,
)


def split(data, tokens):
    """`tokens` in pieces of any size."""
    pieces, at = [], 0
    while at < len(tokens):
        size = data.draw(st.integers(1, 7))
        pieces.append(tokens[at : at + size])
        at += size
    return pieces


@settings(max_examples=100, deadline=None)
@given(text=TEXT, data=st.data())
def test_text_comes_out_whole(tokenizer, text, data):
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream, shown = TextStream(tokenizer), ""
    for piece in split(data, tokens):
        shown += stream.push(piece)
        assert text.startswith(shown)
    assert shown + stream.finish() == text


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 258), max_size=60), data=st.data())
def test_any_tokens_add_up(tokenizer, tokens, data):
    """Broken UTF-8 and special tokens included."""
    stream = TextStream(tokenizer)
    pieces = [stream.push(piece) for piece in split(data, tokens)]
    assert not any(piece.endswith(BROKEN) for piece in pieces)
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces) + stream.finish() == expected


def test_a_character_is_held_back_until_it_is_whole(tokenizer):
    stream = TextStream(tokenizer)
    tokens = tokenizer("a€b")["input_ids"]
    assert [stream.push([token]) for token in tokens] == ["a", "", "", "€", "b"]
    assert stream.finish() == ""
    assert stream.push(tokens[1:3]) == "" and stream.finish() == BROKEN


@pytest.fixture(scope="module")
def fallback():
    """As SentencePiece models have it: bytes that are no character spoil their whole run, and the
    first word loses its leading space."""
    words = ["<unk>", "▁", "▁hi", "▁there", "a"]
    vocab = {token: i for i, token in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["▁hi", "▁there", "a", "€", "漢字漢字漢字", "😀", "é"]), max_size=12
    ),
    data=st.data(),
)
def test_byte_fallback(fallback, parts, data):
    tokens = []
    for part in parts:
        if part in fallback.get_vocab():
            tokens.append(fallback.convert_tokens_to_ids(part))
        else:
            names = [f"<0x{byte:02X}>" for byte in part.encode()]
            tokens += fallback.convert_tokens_to_ids(names)
    expected = fallback.decode(tokens)
    stream, shown = TextStream(fallback), ""
    for piece in split(data, tokens):
        shown += stream.push(piece)
        assert expected.startswith(shown)
    assert shown + stream.finish() == expected
    assert BROKEN not in expected
