"""The API as OpenAI's own client uses it."""

import itertools
import json

import openai
import pytest

import dspark
from dspark.core.sampling import SamplingParams

NO_EOS = {"ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hello there"}]


def test_chat(server, tiny_llm):
    answer = server.client().chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, extra_body=NO_EOS
    )
    [choice] = answer.choices
    [expected] = tiny_llm.chat(
        MESSAGES[0]["content"], SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    )
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.total_tokens == 12 + answer.usage.prompt_tokens
    assert answer.model == "tiny" and answer.object == "chat.completion"


def test_a_stream_is_the_same_text(server):
    client = server.client()
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 5, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*client.chat.completions.create(**asked, **options)]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_speculation_and_verification_are_the_requests_choice(server):
    client = server.client()
    texts = set()
    for extra in (
        {"speculation": "off"},
        {"speculation": "auto"},
        {"speculation": {"max": 1}},
        {"verification": "coupled"},
    ):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=3, max_tokens=12,
            extra_body={**extra, "ignore_eos": True},
        )  # fmt: skip
        texts.add(answer.choices[0].message.content)
    assert len(texts) == 1
    off = server.chat(speculation="off", token_details=True).json()
    fates = {token["fate"] for token in off["choices"][0]["dspark"]["tokens"]}
    assert fates == {"plain"}


def test_choices(server):
    answer = server.client().chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, max_tokens=10, extra_body=NO_EOS
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage.completion_tokens == 30


def test_two_names_of_one_limit(server):
    agreed = server.chat(max_tokens=3, max_completion_tokens=3, temperature=0)
    assert agreed.status_code == 200
    answer = server.chat(max_tokens=3, max_completion_tokens=4, temperature=0)
    assert answer.status_code == 400
    assert "max_tokens is 3 and max_completion_tokens" in answer.json()["error"]["message"]


def test_completions(server, tiny_llm):
    client = server.client()
    params = SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)
    prompts = ["One", "Two and more"]
    expected = [output.text for output in tiny_llm.generate(prompts, params)]
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 9, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt=prompts, **asked)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1]
    ids = [tiny_llm.tokenizer(prompt)["input_ids"] for prompt in prompts]
    answer = client.completions.create(prompt=ids, **asked)
    assert [choice.text for choice in answer.choices] == expected
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=prompts, stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected
    answer = client.completions.create(prompt="One", n=2, echo=True, **asked)
    assert [choice.text for choice in answer.choices] == ["One" + expected[0]] * 2


def test_token_details(server):
    answer = server.chat(token_details=True, max_tokens=20, temperature=0).json()
    tokens = answer["choices"][0]["dspark"]["tokens"]
    assert len(tokens) == 20
    assert "".join(token["text"] for token in tokens) == answer["choices"][0]["message"]["content"]
    assert tokens[0]["fate"] == "plain" and tokens[0]["round"] == 0
    for before, token in itertools.pairwise(tokens):
        assert token["round"] in (before["round"], before["round"] + 1)
        if token["round"] == before["round"]:
            assert token["position"] == before["position"] + 1 and before["fate"] == "accepted"
        else:
            assert token["position"] == 1
        assert token["fate"] != "plain" or token is tokens[-1]  # no room for a draft there
        if token["fate"] in ("accepted", "corrected"):
            assert 0 < token["survival"] <= token["confidence"] < 1
    assert server.serving.notes._watched == {}, "nothing is kept of a request that ended"


def test_models_and_versions(server):
    [model] = server.client().models.list().data
    assert model.id == "tiny" and model.max_model_len == 256
    assert server.client().models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("other")
    assert server.http.get("/version").json() == {"version": dspark.__version__}
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").status_code == 200


def test_tokens_there_and_back(server, tiny_llm):
    tokens = server.post("/tokenize", {"prompt": "Grüße"}).json()
    assert tokens["tokens"] == tiny_llm.tokenizer("Grüße")["input_ids"]
    assert tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Grüße"}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert chat["tokens"] == tiny_llm.encode_chat(MESSAGES[0]["content"])[0]
    for body in ({}, {"prompt": "a", "messages": MESSAGES}):
        assert server.post("/tokenize", body).status_code == 400
    assert server.post("/detokenize", {"tokens": [10**9]}).status_code == 400


def test_content_in_parts_and_answers_sent_back(server):
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    first = server.chat(messages=[{"role": "user", "content": parts}], seed=1).json()
    assert first["choices"] == server.chat(messages=MESSAGES, seed=1).json()["choices"]
    conversation = [*MESSAGES, first["choices"][0]["message"], {"role": "user", "content": "More"}]
    assert server.chat(messages=conversation).status_code == 200


def test_live_numbers(server):
    server.chat(max_tokens=30)
    stats = server.http.get("/stats").json()
    assert stats["server"]["model"] == "tiny" and stats["engine"]["pages"] > 0
    totals = stats["totals"]
    assert totals["emitted"] >= 29 and totals["verified"] >= totals["accepted"]
    assert sum(stats["lengths"]) > 0 and stats["positions"][0]["offered"] > 0
    assert stats["steps"][-1]["seconds"].keys() >= {"draft", "verify", "commit"}
    assert json.dumps(stats)


def test_the_page_and_its_files(server):
    page = server.http.get("/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    for name in ("style.css", "main.js", "live.js", "playground.js", "charts.js", "api.js"):
        assert server.http.get(f"/{name}").status_code == 200
        text = server.http.get(f"/{name}").text.replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for path in ("/..%2f..%2fapp.py", "/%2e%2e/app.py", "/../config.py", "/page/../../app.py"):
        assert server.http.get(path).status_code == 404
