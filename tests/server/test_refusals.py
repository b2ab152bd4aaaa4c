"""What is refused, how it is said, and that nothing is left behind."""

import json

import openai
import pytest

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"temprature": 1}, "temprature"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_p": "0.5"}, "top_p"),
        ({"top_k": 1e308}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"n": True}, "n"),
        ({"stop_token_ids": [10**40]}, "stop_token_ids"),
        ({"min_tokens": 2**70}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 17}, "17 choices in all; at most 16 here"),
        ({"stop": [""]}, "stop"),
        ({"verification": "hope"}, "verification"),
        ({"speculation": "often"}, "speculation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "usage"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "emperor", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "poem"}}, "response_format"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"seed": 2**80}, "seed"),
    ],
)
def test_bad_fields_are_named(server, body, named):
    # Written by hand: half of a surrogate pair is legal JSON, and no client would send it.
    text = json.dumps({"messages": MESSAGES, **body})
    answer = server.http.post(CHAT, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert named in error["message"] or named in str(error["param"])


def test_a_prompt_that_does_not_fit(server):
    answer = server.chat(messages=[{"role": "user", "content": "a" * 300}])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "256" in answer.json()["error"]["message"]
    answer = server.chat(max_tokens=255)
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]


def test_halves_of_characters(server):
    """Legal JSON, and no text: no tokenizer takes it."""
    for path in ("/v1/completions", "/tokenize"):
        for prompt in ('"\\ud800"', '"a\\udfffb"'):
            text = f'{{"prompt": {prompt}}}'
            answer = server.http.post(
                path, content=text, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, answer.text
            assert "surrogate" in answer.json()["error"]["message"]


def test_the_clients_exceptions(server):
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, top_p=3)
    assert caught.value.param == "top_p"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": NaN}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"messages": ' + b"9" * 6000 + b"}",
    ],
)
def test_bodies_that_are_no_request(server, content):
    answer = server.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"]
    if "not JSON" in error["message"]:
        assert error["param"] is None, "where in the body is no field"


def test_bodies_that_are_too_large(server):
    body = json.dumps({"messages": [{"role": "user", "content": "a" * 2_000_000}]}).encode()
    answer = server.http.post(CHAT, content=body)
    assert answer.status_code == 413 and "1048576" in answer.json()["error"]["message"]
    # Chunked: no length is announced.
    answer = server.http.post(CHAT, content=iter([body[:1000], body[1000:]]))
    assert answer.status_code == 413


def test_paths_and_methods(server):
    for path in ("/v1/nothing", "/v1/chat/completions/", "/etc/passwd"):
        answer = server.http.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "there is no such path here"
    assert server.http.get(CHAT).status_code == 405


def test_request_ids(server):
    given = server.http.get("/version", headers={"x-request-id": "abc-1.2_3"})
    assert given.headers["x-request-id"] == "abc-1.2_3"
    for bad in ("a b", "x" * 65, "a;b", "<script>"):
        answer = server.http.get("/version", headers={"x-request-id": bad})
        assert answer.headers["x-request-id"] != bad


def test_schemas_that_are_bombs(server):
    deep: dict = {"type": "object"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in ({"type": "nothing"}, {"type": "string", "pattern": "(" * 50}, deep):
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = server.chat(response_format=asked)
        assert answer.status_code in (200, 400), answer.text
    server.wait_idle()
