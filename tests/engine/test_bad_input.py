"""What an engine refuses, in one line, before anything runs."""

import math

import pytest

from dspark.core.errors import ConfigError, PromptError, UserError
from dspark.core.guided import Guided
from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.scheduling.policies import FixedLength
from tests.engine.setup import GREEDY, VOCAB, engine_of, run, target


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([1] * 499, GREEDY, r"499 tokens and max_new_tokens is 14.*512 tokens"),
        ([1, VOCAB], GREEDY, rf"\[0, {VOCAB}\)"),
        ([-1], GREEDY, rf"\[0, {VOCAB}\)"),
    ],
)
def test_prompts(prompt, params, message):
    engine = engine_of()
    with pytest.raises(PromptError, match=message) as caught:
        engine.add(prompt, params)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert engine.idle and not engine.records
    assert len(run([[1]], GREEDY, engine=engine).tokens[0]) == 14, "the engine still works"


def test_the_longest_request_fits_exactly():
    engine = engine_of(page_size=7)
    limit = 512
    params = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)
    assert len(run([[1] * (limit - 2)], params, engine=engine).tokens[0]) == 2


def test_a_request_that_the_cache_can_never_hold():
    engine = engine_of(cache_tokens=32, page_size=16)
    with pytest.raises(PromptError, match="32 tokens"):
        engine.add([1] * 19, GREEDY)
    engine.add([1] * 18, GREEDY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.1),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("max_new_tokens", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("verification", "hope"),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", [1]),
        ("banned_token_ids", (-1,)),
        ("stop_token_ids", (1.5,)),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop", (1,)),
        ("stop", ("a",) * 65),
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("min_tokens", -1),
        ("min_tokens", 257),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("speculation", "on"),
        ("speculation", 0),
    ],
)
def test_sampling_parameters(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is .*; it must be ") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)


def test_guided_is_no_plain_text():
    with pytest.raises(ConfigError, match=r"Guided.regex\(...\)"):
        SamplingParams(guided="a+")


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_guided_decides_where_the_text_ends(other):
    with pytest.raises(ConfigError, match="guided decoding ends the text where the grammar does"):
        SamplingParams(guided=Guided.regex("a+"), **other)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias has token {VOCAB}"),
        ({"banned_token_ids": (VOCAB,)}, f"banned_token_ids has token {VOCAB}"),
        ({"stop_token_ids": (VOCAB + 5,)}, f"stop_token_ids has token {VOCAB + 5}"),
        ({"banned_token_ids": tuple(range(VOCAB))}, "banned_token_ids has every token"),
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"guided": Guided.regex("a")}, "guided decoding needs a tokenizer"),
    ],
)
def test_what_this_engine_cannot_do(params, message):
    engine = engine_of()
    with pytest.raises(ConfigError, match=message):
        engine.add([1], SamplingParams(**params))
    assert engine.idle


def test_a_policy_that_drafts_needs_a_drafter():
    with pytest.raises(ConfigError, match=r"'fixed:3' needs a drafter"):
        Engine(target(), None, FixedLength(3))


@pytest.mark.parametrize(
    "name", ["max_requests", "chunk_tokens", "cache_tokens", "page_size", "max_waiting"]
)
def test_engine_configuration(name):
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        EngineConfig(**{name: 0})
