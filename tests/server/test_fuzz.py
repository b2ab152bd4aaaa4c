"""The scripts that load and fuzz a server, tried on a tiny one."""

import argparse
import asyncio
import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("fuzz_server", "open_loop"):
        sys.modules.pop(name, None)


def test_no_body_breaks_the_server(server):
    import fuzz_server

    random_ = random.Random(5)
    statuses = set()
    for _ in range(300):
        path, content = fuzz_server.body(random_)
        answer = server.http.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        statuses.add(answer.status_code)
        assert fuzz_server.problem(answer.status_code, answer.content) is None, content
    assert {200, 400} <= statuses
    server.wait_idle()


def test_an_open_loop_loses_nothing(server):
    import open_loop

    arguments = argparse.Namespace(
        url=server.url, tokens=4, key=None, rate=20.0, seconds=1.0, pid=None
    )
    document = asyncio.run(open_loop.run(arguments))
    assert document["answered"] == document["sent"] > 5
    assert document["lost"] == 0 and document["problems"] == []
    server.wait_idle()
