"""Guided decoding through llguidance on a tokenizer of bytes, with a drafter that only guesses."""

import json
import re
import sys
import time

import pytest
import torch

from dspark.core.errors import ConfigError, MissingExtraError
from dspark.core.guided import Guided
from dspark.core.sampling import SamplingParams
from dspark.engine.engine import Engine
from dspark.engine.guided import GrammarCompiler
from dspark.scheduling.policies import FixedLength, Off
from tests.engine.drafters import RandomDrafter

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PATTERN = r"(ab|c[0-9]{2}d)+!"


@pytest.fixture(scope="module")
def compiler(tokenizer, loaded_target):
    target = loaded_target.target
    return GrammarCompiler(tokenizer, target.vocab_size, target.eos_token_ids)


def texts(loaded_target, tokenizer, policy, many):
    """Text and ending of one request each."""
    drafter = None
    if policy.drafts:
        drafter = RandomDrafter(4, loaded_target.binding.embedding_VD)
    engine = Engine(loaded_target.target, drafter, policy, tokenizer=tokenizer)
    if drafter is not None:
        drafter.engine = engine
    prompt = tokenizer("Say:")["input_ids"]
    ids = [engine.add(prompt, params) for params in many]
    written, last = dict.fromkeys(ids, ""), {}
    for event in engine.run():
        assert event.error is None
        written[event.request] += event.text
        last[event.request] = event.finished
    return [(written[i], last[i]) for i in ids], engine


def params(guided, seed, **changes):
    values = {"temperature": 1.2, "seed": seed, "max_new_tokens": 60}
    return SamplingParams(guided=guided, **values | changes)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_texts_match(loaded_target, tokenizer, rule):
    many = [params(Guided.regex(PATTERN), seed, verification=rule) for seed in range(6)]
    many += [params(Guided.json_schema(SCHEMA), seed, verification=rule) for seed in range(3)]
    results, engine = texts(loaded_target, tokenizer, FixedLength(4), many)
    ended = 0
    for own, (text, reason) in zip(many, results, strict=True):
        if reason == "stop":
            ended += 1
            if own.guided.kind == "regex":
                assert re.fullmatch(PATTERN, text)
            else:
                value = json.loads(text)
                assert isinstance(value["a"], int) and value["b"] in ("x", "yes")
    assert ended >= 5, "most texts must have come to their end"
    rounds = [record for step in engine.records for record in step.rounds]
    assert sum(record.accepted for record in rounds) > 20
    assert any(r.ended and r.emitted == r.accepted for r in rounds), "an end inside a block"


def test_coupled_texts_do_not_depend_on_speculation(loaded_target, tokenizer):
    many = [params(Guided.regex(PATTERN), 1), params(Guided.json_schema(SCHEMA), 2)]
    many += [params(Guided.grammar('start: "ab" | "b" start'), 3, temperature=0.0)]
    plain, _ = texts(loaded_target, tokenizer, Off(), many)
    drafted, _ = texts(loaded_target, tokenizer, FixedLength(3), many)
    assert drafted == plain


class TestMatcher:
    def words(self, tokenizer, allowed_V):
        return {tokenizer.decode([t]) for t in torch.nonzero(allowed_V)[:, 0].tolist()}

    def test_it_follows_a_draft_and_comes_back(self, compiler, tokenizer):
        grammar = compiler.compile(Guided.regex("ab(c|de)"))
        a, b, c, d = tokenizer("abcd", add_special_tokens=False)["input_ids"]
        assert self.words(tokenizer, grammar.allowed(())) == {"a"}
        assert self.words(tokenizer, grammar.allowed((a, b))) == {"c", "d"}
        assert self.words(tokenizer, grammar.allowed((a, b, d))) == {"e"}
        assert grammar.allowed((a, c)) is None and grammar.allowed((a, c, b)) is None
        assert self.words(tokenizer, grammar.allowed((a,))) == {"b"}
        grammar.commit((a, b))
        assert self.words(tokenizer, grammar.allowed(())) == {"c", "d"}
        eos = tokenizer.eos_token_id
        (only,) = torch.nonzero(grammar.allowed((c,)))[:, 0].tolist()
        assert only == eos

    def test_ids_beyond_the_tokenizers_are_forbidden(self, compiler):
        allowed_V = compiler.compile(Guided.regex("(.|\n)*")).allowed(())
        assert len(allowed_V) == 264 and not allowed_V[259:].any()
        assert compiler.compile(Guided.regex("a*")).allowed((261,)) is None

    def test_a_compiled_grammar_is_handed_out_fresh(self, compiler, tokenizer):
        one = compiler.compile(Guided.regex("xy"))
        (x,) = tokenizer("x", add_special_tokens=False)["input_ids"]
        one.commit((x,))
        again = compiler.compile(Guided.regex("xy"))
        assert self.words(tokenizer, again.allowed(())) == {"x"}


@pytest.mark.parametrize(
    "guided",
    [
        Guided.regex("(unclosed"),
        Guided.regex("(?=look)ahead"),
        Guided.grammar("start: nothing"),
        Guided.grammar("not lark at all {"),
        Guided.json_schema({"type": "no such type"}),
        Guided.json_schema({"$ref": "https://example.invalid/schema"}),
    ],
    ids=str,
)
def test_what_does_not_compile_is_refused_in_one_line(compiler, guided):
    with pytest.raises(ConfigError, match=f"{guided.kind} cannot be used") as caught:
        compiler.compile(guided)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "guided",
    [
        Guided.regex("((a{1,400}){1,400}){1,400}"),
        Guided.regex("(a|b)*a(a|b){300}" * 40),
        Guided.json_schema({"type": "string", "pattern": "^(((x{0,999}){0,999}){0,999})$"}),
    ],
    ids=["nested", "wide", "schema"],
)
def test_compiling_is_bounded(compiler, guided):
    """Refused, or cheap; the bound is loose because machines differ, and what is not bounded takes
    minutes or all memory."""
    started = time.process_time()
    try:
        compiler.compile(guided)
    except ConfigError as error:
        assert "cannot be used" in str(error)
    assert time.process_time() - started < 10


def test_without_the_library(compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dspark\[guided\]'"):
        compiler.compile(Guided.regex("never seen before"))
