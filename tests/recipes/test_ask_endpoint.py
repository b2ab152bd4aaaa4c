"""Another server's answers: whatever it does, no answer is lost and none is there twice."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dspark.core.errors import ConfigError, DSparkError
from dspark.data.endpoint import EndpointConfig
from dspark.data.prompts import Prompt
from dspark.data.responses import ResponseFile
from dspark.data.template import encode_messages, template_hash
from dspark.recipes.ask_endpoint import ask_endpoint
from dspark.recipes.progress import Progress
from dspark.recipes.regenerate import RegenerateConfig
from dspark.targets.load import LoadedTarget

PROMPTS = [Prompt("chat", line, (f"question{line}", "more?")) for line in range(1, 9)]
CONFIG = RegenerateConfig(max_new_tokens=20)

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


def said(text: str, finish: str = "stop", **more: Any) -> Answer:
    message = {"role": "assistant", "content": text, **more}
    body = {"choices": [{"message": message, "finish_reason": finish}]}
    return 200, {}, json.dumps(body).encode()


class Seen:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.at_once = self.most_at_once = 0


@contextmanager
def server(answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[tuple[str, Seen]]:
    """`answer` gets a request's body and how many requests came before it."""
    seen = Seen()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(200, {}, json.dumps({"data": [{"id": "talker"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.lock:
                number = len(seen.bodies)
                seen.bodies.append(body)
                seen.keys.add(self.headers["Authorization"])
                seen.at_once += 1
                seen.most_at_once = max(seen.most_at_once, seen.at_once)
            try:
                self.reply(*answer(body, number))
            except (BrokenPipeError, ConnectionResetError):
                pass  # a client that has lost patience
            finally:
                with seen.lock:
                    seen.at_once -= 1

        def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", seen
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def ask(
    talker: LoadedTarget, path: Path, url: str, prompts: list[Prompt] = PROMPTS, **options: Any
) -> ResponseFile:
    file = ResponseFile(
        path, target=talker.name, template_hash=template_hash(talker.tokenizer), vocab_size=200
    )
    settings = {"concurrency": 4, "first_wait": 0.001, "timeout": 20.0, "tries": 3, **options}
    endpoint = EndpointConfig(url=url, **settings)
    ask_endpoint(talker.tokenizer, prompts, file, CONFIG, endpoint, Progress(quiet=True))
    return file


def test_every_turn_in_order_whatever_the_order_of_replies(
    talker: LoadedTarget, tmp_path: Path
) -> None:
    def answer(body: dict[str, Any], number: int) -> Answer:
        time.sleep(0.03 * (number % 3))  # later requests overtake earlier ones
        asked = body["messages"][-1]["content"]
        return said(f"re:{asked}:{len(body['messages'])}:{body['temperature']}")

    with server(answer) as (url, seen):
        file = ask(talker, tmp_path / "r.jsonl", url, api_key="secret")
        assert len(file) == len(seen.bodies) == 8 * 2 * 2
        ask(talker, tmp_path / "r.jsonl", url)
        assert len(seen.bodies) == 32, "nothing is asked twice"
    assert 1 < seen.most_at_once <= 4
    assert seen.keys == {"Bearer secret"}
    assert {body["model"] for body in seen.bodies} == {"talker"}
    assert len({(body["seed"], body["temperature"]) for body in seen.bodies}) == 32
    second = file["chat", 3, 1, 1]
    conversation = PROMPTS[2].conversation(("re:question3:1:0.0", None))
    assert second.prompt_ids.tolist() == encode_messages(talker.tokenizer, conversation)
    assert talker.tokenizer.decode(second.response_ids) == "re:more?:3:0.0<eos>"
    assert second.temperature == 0.0 and second.finish_reason == "stop"
    assert len({tuple(r.key) for r in file.responses}) == 32


def test_a_cut_answer_did_not_say_that_it_ended(talker: LoadedTarget, tmp_path: Path) -> None:
    with server(lambda body, number: said("and-so-on", "length")) as (url, _):
        file = ask(talker, tmp_path / "r.jsonl", url, PROMPTS[:1])
    first = file["chat", 1, 0, 0]
    assert talker.tokenizer.decode(first.response_ids) == "and-so-on"
    assert first.finish_reason == "length"


def test_passing_troubles_pass(talker: LoadedTarget, tmp_path: Path) -> None:
    troubles: list[Answer] = [
        (503, {}, b"loading"), (429, {"Retry-After": "0"}, b"slowly"), (200, {}, b"<html>"),
        (200, {}, b'{"choices": []}'), (500, {}, b"oops"),
    ]  # fmt: skip

    def answer(body: dict[str, Any], number: int) -> Answer:
        return troubles[number] if number < len(troubles) else said("fine-fine")

    with server(answer) as (url, seen):
        file = ask(talker, tmp_path / "r.jsonl", url, tries=9)
    assert len(file) == 32 and len(seen.bodies) == 32 + len(troubles)


def test_what_fails_is_counted_and_asked_again(talker: LoadedTarget, tmp_path: Path) -> None:
    broken = True

    def answer(body: dict[str, Any], number: int) -> Answer:
        asked = body["messages"][0]["content"]
        if broken and asked == "question2":
            return said("   ")
        if broken and asked == "question5":
            return 400, {}, b"too long"
        if broken and asked == "question7":
            return said("hm", reasoning_content="first I think")
        return said("fine-fine")

    with server(answer) as (url, _):
        with pytest.raises(DSparkError) as caught:
            ask(talker, tmp_path / "r.jsonl", url, concurrency=5)
        message = str(caught.value)
        assert "6 of 26 answers failed" in message and "2 empty answer" in message
        assert "2 HTTP 400" in message and "2 thought apart from the answer" in message
        broken = False
        file = ask(talker, tmp_path / "r.jsonl", url)
    assert len(file) == 32


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {}, b"no"), "HTTP 401: no; is the API key right"),
        ((404, {}, b"no"), "the URL ends before /chat/completions"),
        ((200, {}, b"hello"), "not JSON .* 0 responses written"),
        ((200, {}, b"[1]"), "holds no choice"),
        (said("half a pair: \ud800"), "no valid Unicode"),
    ],
)
def test_a_server_that_is_no_use(
    talker: LoadedTarget, tmp_path: Path, answer: Answer, message: str
) -> None:
    with server(lambda body, number: answer) as (url, seen):
        with pytest.raises(DSparkError, match=message) as caught:
            ask(talker, tmp_path / "r.jsonl", url, tries=2)
        assert len(seen.bodies) < 32
    assert "run the same command again" in str(caught.value)


def test_a_server_that_is_down_or_slow(talker: LoadedTarget, tmp_path: Path) -> None:
    with server(lambda body, number: said("x")) as (url, _):
        pass
    with pytest.raises(DSparkError, match="cannot be reached"):
        ask(talker, tmp_path / "r.jsonl", url, tries=2)
    release = threading.Event()

    def slow(body: dict[str, Any], number: int) -> Answer:
        release.wait(20)
        return said("late")

    with server(slow) as (url, _):
        try:
            with pytest.raises(DSparkError, match=r"says nothing for 0\.2 s .*too slow"):
                ask(talker, tmp_path / "r.jsonl", url, timeout=0.2, tries=1)
        finally:
            release.set()


def test_bad_settings() -> None:
    for settings, message in (
        ({"url": "localhost:8000"}, "http://"),
        ({"url": "http://x", "tries": 0}, "tries is 0"),
        ({"url": "http://x", "timeout": 0.0}, "timeout is 0"),
        ({"url": "http://x", "timeout": float("inf")}, "timeout is inf; .* at most 86400"),
        ({"url": "http://"}, "must be http://HOST"),
        ({"url": "http://a b/v1"}, "must be http://HOST"),
        ({"url": "http://[::1/v1"}, "it is no URL"),
        ({"url": "http://x:port/v1"}, "it is no URL"),
        ({"url": "http://x", "api_key": "key\n"}, "the API key must be printable ASCII"),
    ):
        with pytest.raises(ConfigError, match=message):
            EndpointConfig(**settings)  # type: ignore[arg-type]
