"""Log-probabilities in both shapes, and the requests that evaluation harnesses score with."""

import json
import math

import pytest

from dspark.core.sampling import SamplingParams

MESSAGES = [{"role": "user", "content": "Hello there"}]
NO_EOS = {"ignore_eos": True}


def test_chat(server):
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 4, "max_tokens": 9, "logprobs": True}
    client = server.client()
    whole = client.chat.completions.create(**asked, top_logprobs=3, extra_body=NO_EOS)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 9
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert bytes(entry.bytes).decode() == entry.token
    streamed = []
    for chunk in client.chat.completions.create(
        **asked, top_logprobs=3, extra_body=NO_EOS, stream=True
    ):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == entries


def test_scoring_as_lm_eval_does(server, tiny_llm):
    prompt = tiny_llm.tokenizer("The answer is 42")["input_ids"]
    params = SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=1, ignore_eos=True)
    stream = server.serving.engine.submit(prompt, params)
    expected = [one and one.logprob for event in stream for one in event.prompt_logprobs]
    for max_tokens in (0, 1):
        answer = server.client().completions.create(
            model="tiny", prompt=[prompt, prompt], temperature=0, max_tokens=max_tokens,
            logprobs=1, echo=True, seed=1234,
        )  # fmt: skip
        assert answer.usage.completion_tokens == 2 * max_tokens
        for choice in answer.choices:
            logprobs = choice.logprobs
            assert choice.text.startswith("The answer is 42")
            count = len(prompt) + max_tokens
            assert len(logprobs.tokens) == len(logprobs.token_logprobs) == count
            assert len(logprobs.top_logprobs) == len(logprobs.text_offset) == count
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            assert logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(expected[1:], abs=1e-5)
            # As the harness decides whether a continuation is the greedy one.
            for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True):
                assert token in top and max(top.values()) >= top[token]


def test_draft_and_target_probabilities_of_tokens(server):
    """At temperature 0 a slot holds one token: the one that was drafted."""
    seen = set()
    for temperature in (0, 1.5):
        answer = server.chat(
            token_details=True, logprobs=True, max_tokens=60, temperature=temperature, seed=2
        )
        choice = answer.json()["choices"][0]
        entries = choice["logprobs"]["content"]
        for token, entry in zip(choice["dspark"]["tokens"], entries, strict=True):
            assert token["target_prob"] == pytest.approx(math.exp(entry["logprob"]))
            drafted = token["fate"] in ("accepted", "corrected")
            assert ("draft_prob" in token) == drafted, token
            if drafted and temperature == 0:
                assert token["draft_prob"] == (token["fate"] == "accepted")
            elif drafted:
                assert token["fate"] == "corrected" or 0 < token["draft_prob"] < 1
            seen.add((temperature, token["fate"]))
    assert {(0, "corrected"), (1.5, "accepted"), (1.5, "corrected")} <= seen


def test_guided_answers(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    answer = server.client().chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=60, seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 2)
    assert answer.choices[0].finish_reason == "stop"


def test_stop_strings(server):
    client = server.client()
    asked = {"model": "tiny", "prompt": "One", "temperature": 0, "max_tokens": 30}
    text = client.completions.create(**asked, extra_body=NO_EOS).choices[0].text
    stop = text[3:5]
    answer = client.completions.create(**asked, stop=stop, extra_body=NO_EOS)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
