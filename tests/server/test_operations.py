"""Keys, limits, clients that leave, deadlines, shutdown, logs."""

import json
import logging
import signal
import socket
import threading
import time

import httpx2
import openai
import pytest

from dspark.core.errors import ConfigError
from dspark.server.auth import ApiKeys
from dspark.server.config import ServerConfig
from dspark.server.errors import ApiError
from dspark.server.limits import KeyLimits
from dspark.server.logs import JsonLines
from tests.forked import dspark
from tests.server.conftest import wait_until

MESSAGES = [{"role": "user", "content": "Hello"}]
LONG = {"messages": MESSAGES, "max_tokens": 200, "ignore_eos": True, "stream": True}


def open_stream(server, body=LONG):
    """A raw connection that asks and has read the first bytes of the answer."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    text = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(text), text)
    )
    return connection


@pytest.fixture
def slow(monkeypatch):
    """Every step waits a little, so that there is something to interrupt."""
    from dspark.engine.engine import Engine

    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (time.sleep(0.02), step(self))[1])


@pytest.fixture
def gate(monkeypatch):
    """While it is closed, the engine's step waits: what is asked stays open. It starts closed."""
    from dspark.engine.engine import Engine

    opened, step = threading.Event(), Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (opened.wait(60), step(self))[1])
    yield opened
    opened.set()


def test_keys(make_server, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nsecret-one\n\nsecret-two\n")
    server = make_server(api_keys=file)
    for key in ("secret-one", "secret-two"):
        assert server.client(key).models.list().data
    for key in ("secret-on", "secret-one2", "Secret-one", ""):
        with pytest.raises(openai.AuthenticationError):
            server.client(key or "x").models.list()
    for path in ("/v1/models", "/stats"):
        assert server.http.get(path).status_code == 401
    assert server.post("/v1/chat/completions", "not even JSON").status_code == 401
    assert server.post("/tokenize", {"prompt": "a"}).status_code == 401
    for path in ("/health", "/ready", "/version", "/metrics", "/"):
        assert server.http.get(path).status_code == 200


def test_where_keys_come_from(tmp_path):
    assert not ApiKeys.load(None, {})
    keys = ApiKeys.load(None, {"DSPARK_API_KEYS": "first-key-1,second-key"})
    assert keys.check("Bearer second-key") != keys.check("bearer first-key-1")
    for bad in (None, "", "Bearer", "Bearer first-key", "Basic first-key-1", "Bearer \udcff"):
        with pytest.raises(ApiError):
            keys.check(bad)
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.load(tmp_path / "nothing")
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(ConfigError, match="no API key"):
        ApiKeys.load(tmp_path / "empty")
    with pytest.raises(ConfigError, match="at least 8"):
        ApiKeys(["short"])


def test_limits():
    now = [0.0]
    limits = KeyLimits(requests_per_minute=2, concurrent_requests=1, clock=lambda: now[0])
    with limits.request("a"):
        with pytest.raises(ApiError, match="1 requests running"), limits.request("a"):
            pass
        with limits.request("b"):
            pass
    with limits.request("a"):
        pass
    with pytest.raises(ApiError, match="2 requests a minute") as refused, limits.request("a"):
        pass
    assert refused.value.status == 429 and refused.value.headers["Retry-After"] == "30"
    now[0] += 30.0
    with limits.request("a"):
        pass


def test_limits_over_http(make_server, gate):
    server = make_server(concurrent_requests=1)
    with open_stream(server):
        wait_until(lambda: server.serving.engine.open_choices == 1)
        refused = server.chat()
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.client().chat.completions.create(model="tiny", messages=MESSAGES)
        gate.set()
    server.wait_idle()
    wait_until(lambda: server.chat().status_code == 200)
    once = make_server(requests_per_minute=1)
    assert once.chat().status_code == 200 and once.chat().status_code == 429
    assert once.http.get("/v1/models").status_code == 200, "only completions count"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_its_pages(make_server, slow, stream):
    server = make_server()
    connection = open_stream(server, {**LONG, "stream": stream, "n": 2})
    wait_until(lambda: server.pages_used() > 0)
    if stream:
        assert connection.recv(2000)
    connection.close()
    server.wait_idle()
    wait_until(lambda: server.metric("dspark_requests_finished_total") == 2)
    assert server.metric("dspark_emitted_tokens_total") < 150, "it went on for nobody"
    assert server.chat().status_code == 200


def test_a_reader_that_reads_nothing_blocks_nobody(make_server):
    server = make_server()
    with open_stream(server, {**LONG, "n": 4, "max_tokens": 60, "token_details": True}):
        for _ in range(3):
            assert server.chat().status_code == 200
        server.wait_idle()


def test_a_request_that_takes_too_long(make_server, slow):
    server = make_server(request_timeout=0.3)
    answer = server.chat(max_tokens=200)
    assert answer.status_code == 504 and "0.3 seconds" in answer.json()["error"]["message"]
    lines = server.chat(max_tokens=200, stream=True).text.strip().split("\n\n")
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
    assert lines[-1] == "data: [DONE]"
    with pytest.raises(openai.APIError, match="seconds"):
        for _ in server.client().chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=200, stream=True,
            extra_body={"ignore_eos": True},
        ):  # fmt: skip
            pass
    server.wait_idle()


def test_an_answer_in_flight_survives_the_drain(make_server, gate):
    server = make_server(drain_timeout=30)
    result = {}
    asker = threading.Thread(target=lambda: result.update(answer=server.chat(max_tokens=60)))
    asker.start()
    wait_until(lambda: server.serving.engine.open_choices == 1)
    server.server.handle_exit(signal.SIGTERM, None)
    time.sleep(0.2)
    gate.set()
    asker.join(timeout=60)
    assert result["answer"].status_code == 200
    assert result["answer"].json()["usage"]["completion_tokens"] == 60


def test_what_does_not_finish_in_time_is_told(make_server, slow):
    server = make_server(drain_timeout=0.2)
    result = {}
    asker = threading.Thread(target=lambda: result.update(answer=server.chat(max_tokens=200)))
    asker.start()
    wait_until(lambda: server.serving.engine.open_choices == 1)
    server.server.handle_exit(signal.SIGTERM, None)
    asker.join(timeout=60)
    assert result["answer"].status_code == 503
    assert result["answer"].json()["error"]["code"] == "draining"


def test_draining_refuses(server, monkeypatch):
    monkeypatch.setattr(server.serving, "draining", True)
    assert server.http.get("/ready").status_code == 503
    assert server.http.get("/health").status_code == 200
    refused = server.chat()
    assert refused.status_code == 503 and refused.headers["retry-after"]


def test_metrics(server):
    names = ("emitted_tokens", "verified_tokens", "rounds")
    before = {name: server.metric(f"dspark_{name}_total") for name in names}
    server.chat(max_tokens=21)
    gained = {name: server.metric(f"dspark_{name}_total") - before[name] for name in names}
    assert gained["emitted_tokens"] == 20
    assert 0 < gained["rounds"] <= 20
    assert gained["verified_tokens"] > 0
    accepted = server.metric("dspark_accepted_tokens_total")
    assert server.metric("dspark_position_accepted_tokens_total") == accepted
    for name in ("time_to_first_token_seconds", "inter_token_seconds", "request_seconds"):
        assert server.metric(f"dspark_{name}_count") > 0
    assert server.metric("dspark_pages_free") == server.metric("dspark_pages") > 0
    assert server.metric("dspark_step_seconds_total") > 0


def test_the_log_says_what_happened_and_not_what_was_said(make_server, caplog):
    server = make_server()
    caplog.set_level(logging.INFO, logger="dspark.server")
    secret = "the-color-of-the-safe"
    request_id = "my-request-7"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 3, "user": secret}
    server.post("/v1/chat/completions", body, **{"x-request-id": request_id})
    server.post("/v1/chat/completions", {**body, secret: 1})
    server.http.get(f"/v1/models/{secret}")
    wait_until(lambda: len([r for r in caplog.records if r.message == "request"]) >= 3)
    lines = [JsonLines().format(record) for record in caplog.records]
    assert secret not in "".join(lines)
    first = next(json.loads(line) for line in lines if request_id in line)
    assert first["status"] == 200 and first["path"] == "/v1/chat/completions"
    assert first["prompt_tokens"] > 3 and first["seconds"] > 0 and first["event"] == "request"


def test_bad_settings():
    for field, value in (("port", 70000), ("request_timeout", 0), ("max_prompt_tokens", 0)):
        with pytest.raises(ConfigError, match=field.replace("_", "-")):
            ServerConfig(**{field: value})


def start_process(folder, errors, port="0"):
    """A server in a process of its own, which does not outlive the test."""
    return dspark(
        ["serve", "--port", port, "--target", str(folder[0]), "--draft", str(folder[1]),
         "--weights", "fp32"],
        errors,
    )  # fmt: skip


def wait_for_url(process):
    for line in process.lines():
        if "/v1" in line:
            url = line.split(" at ")[1].split("/v1")[0]
            wait_until_ready(process, url)
            return url
    raise AssertionError("it did not start")


def wait_until_ready(process, url):
    """It says its address before it listens there."""

    def ready():
        assert process.returncode is None, "it did not start"
        try:
            return httpx2.get(f"{url}/ready").status_code == 200
        except httpx2.TransportError:
            return False

    wait_until(ready, seconds=300)


def test_a_process_and_ctrl_c(target_folder, bundle_folder, tmp_path):
    """SIGTERM ends the one that `test_killed_and_started_again` starts."""
    with start_process((target_folder, bundle_folder), tmp_path / "errors") as process:
        url = wait_for_url(process)
        assert httpx2.get(f"{url}/health").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130, process.errors
    assert "Traceback" not in process.errors


def test_a_full_queue_refuses_at_once(make_server, gate):
    server = make_server(max_requests=1, max_waiting=1)
    with open_stream(server), open_stream(server):
        wait_until(lambda: server.serving.engine.open_choices == 2)
        refused = server.chat()
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "later" in refused.json()["error"]["message"]
        gate.set()
    server.wait_idle()
    assert server.metric("dspark_refused_total") == 1
    assert server.chat().status_code == 200
