"""Clients that leave, stall or never finish asking; a process that is killed; a full disk."""

import asyncio
import contextlib
import json
import logging
import socket
import struct
import sys
import time
from pathlib import Path

import httpx2
import pytest

from dspark.server import logs, streaming
from dspark.server.run import open_socket
from tests.server import conftest
from tests.server.conftest import wait_until
from tests.server.raw import connect, read_all
from tests.server.test_operations import LONG, open_stream, start_process, wait_for_url

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"


def test_a_bug_in_one_of_many_answers_is_raised():
    """Or the request would wait for its events for ever."""

    class Broken:
        async def events(self):
            raise ZeroDivisionError
            yield

    async def read():
        async with asyncio.timeout(10):
            async for _ in streaming.merged([Broken(), Broken()]):
                pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(read())


def test_a_client_that_resets_its_connection(make_server, monkeypatch, caplog):
    from dspark.engine.engine import Engine

    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (time.sleep(0.02), step(self))[1])
    server = make_server()
    for stream in (True, False):
        connection = open_stream(server, {**LONG, "stream": stream})
        wait_until(lambda: server.pages_used() > 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        server.wait_idle()
    assert server.metric("dspark_emitted_tokens_total") < 350, "it went on for nobody"
    assert server.chat().status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_what_is_never_asked_to_its_end(make_server):
    """Half a head, half a body, nothing at all: each is let go, and blocks nobody meanwhile."""
    server = make_server(receive_timeout=1.0, concurrent_requests=1)
    # Connections of their own: one that is kept for reuse is closed after a second, too.
    ask = {"prompt": "Hi", "max_tokens": 2}
    silent, half_head, half_body = connect(server), connect(server), connect(server)
    half_head.sendall(b"GET /health HTTP/1.1\r\nHo")
    assert httpx2.get(f"{server.url}/health", timeout=60).status_code == 200
    half_body.sendall(HEAD + b'\r\n{"messages":')
    answer = read_all(half_body)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"nothing of the body came for 1 sec" in answer
    assert read_all(silent) == b"" and read_all(half_head) == b""
    # The key's one place is free again.
    completions = f"{server.url}/v1/completions"
    wait_until(lambda: httpx2.post(completions, json=ask, timeout=60).status_code == 200)
    second = connect(server)
    second.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = second.recv(4096)
    while b'"ok"' not in answer:
        part = second.recv(4096)
        assert part, answer
        answer += part
    second.sendall(b"GET /hea")  # and no more
    assert read_all(second) == b""
    for one in (silent, half_head, half_body, second):
        one.close()


def test_a_body_that_comes_in_drops(make_server):
    server = make_server(receive_timeout=3.0)
    with connect(server) as connection:
        body = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head)
        for start in range(0, len(body), 4):  # nine parts: longer than the limit in all
            time.sleep(0.4)
            connection.sendall(body[start : start + 4])
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_head_without_end(server):
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        try:
            for number in range(10_000):
                connection.sendall(b"X-%d: %b\r\n" % (number, b"a" * 100))
        except OSError:
            return
        assert b"400" in read_all(connection)[:20]
        raise AssertionError("a megabyte of headers was taken")


def test_a_client_whose_machine_is_gone():
    """Nothing tells the server but the kernel's own questions: every connection has them on."""
    with open_socket("127.0.0.1", 0) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()):
            accepted, _ = bound.accept()
            with accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                if sys.platform == "linux":
                    idle = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
                    assert idle == 60


def test_a_reader_that_stopped_reading_is_let_go(make_server, monkeypatch):
    """Its answer does not fit the connection's buffers, so the server cannot get rid of it."""

    def small(host, port):
        bound = open_socket(host, port)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return bound

    monkeypatch.setattr(conftest, "open_socket", small)
    monkeypatch.setattr(streaming, "_GRACE", -27.0)  # 3 seconds from the start
    server = make_server(request_timeout=30.0)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        body = json.dumps({**LONG, "n": 8, "token_details": True, "logprobs": True}).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        )
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: server.pages_used() > 0)
        server.wait_idle()
        wait_until(lambda: server.metric("dspark_requests_finished_total") == 8)
        assert server.chat().status_code == 200
        sent = read_all(connection)
    assert b"[DONE]" not in sent, "it all fitted: this test shows nothing"


def test_a_log_that_cannot_be_written():
    """Lines are lost, nothing else; what a full disk refuses is not piled up, either."""
    with Path("/dev/full").open("w") as full:
        handler = logs.QuietHandler(full)
        handler.setFormatter(logs.JsonLines())
        logger = logging.Logger("full")
        logger.addHandler(handler)
        for number in range(2000):
            logger.info("request", extra={"fields": {"number": number, "text": "x" * 100}})
        handler.stream = None
        with pytest.raises(OSError, match="No space"):
            full.flush()
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.parametrize("damage", ["cut", "config", "missing"])
def test_a_corrupt_bundle_stops_the_start(damage, target_folder, bundle_folder, tmp_path, capsys):
    import shutil

    from dspark.cli.main import build_app, run
    from dspark.cli.serve import serve

    bundle = shutil.copytree(bundle_folder, tmp_path / "bundle")
    tensors = bundle / "model.safetensors"
    if damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif damage == "config":
        (bundle / "config.json").write_text("{")
    else:
        tensors.unlink()
    with pytest.raises(SystemExit) as stopped:
        run(
            build_app({"serve": serve, "other": lambda: None}),
            ["serve", "--port", "0", "--target", str(target_folder), "--draft", str(bundle)],
        )
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "bundle" in said, said


@pytest.mark.slow
def test_killed_and_started_again(target_folder, bundle_folder, tmp_path):
    """Clients see a broken connection; the same command on the same port serves again."""
    folders = (target_folder, bundle_folder)
    with start_process(folders, tmp_path / "first") as first:
        url = wait_for_url(first)
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=60) as answer:
            chunks = answer.iter_raw()
            next(chunks)
            first.kill()
            with pytest.raises(httpx2.TransportError):
                for _ in chunks:
                    pass
    with start_process(folders, tmp_path / "second", port=url.rsplit(":", 1)[1]) as second:
        assert wait_for_url(second) == url
        body = {"prompt": "Hi", "max_tokens": 3}
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        second.terminate()
        assert second.wait() == 0, second.errors
    assert "Traceback" not in second.errors
