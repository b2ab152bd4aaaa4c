"""A real server over a tiny random target, in a thread of this process."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from dspark.engine.config import EngineConfig
from dspark.recipes.llm import LLM
from dspark.recipes.serve import build_serving
from dspark.server.config import ServerConfig
from dspark.server.run import Server, open_socket
from dspark.server.serving import Serving


@dataclass
class Running:
    serving: Serving
    server: Server
    url: str
    http: httpx2.Client

    def client(self, api_key: str = "none at all", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, **options)

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        return self.http.post(path, json=body, headers=headers)

    def chat(self, **body: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": "Hello"}]
        given = {"messages": messages, "max_tokens": 8, "ignore_eos": True, **body}
        return self.post("/v1/chat/completions", given)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        assert any(f"# HELP {name.removesuffix('_count')} " in line for line in lines), name
        samples = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def pages_used(self) -> int:
        stats = self.serving.stats()
        return stats.pages - stats.pages_free

    def wait_idle(self) -> None:
        """Until every request is gone and every page is back."""
        wait_until(lambda: self.serving.engine.open_choices == 0)
        wait_until(lambda: self.pages_used() == 0)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def tiny_llm(target_folder: Path, bundle_folder: Path) -> LLM:
    return LLM(str(target_folder), draft=bundle_folder, weights="fp32")


@contextlib.contextmanager
def running(llm: LLM, **settings: Any) -> Iterator[Running]:
    """settings: fields of ServerConfig and EngineConfig."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    own = {name: value for name, value in settings.items() if name in names}
    config = ServerConfig(
        port=0,
        model_name="tiny",
        **{name: value for name, value in settings.items() if name not in names},
    )
    serving = build_serving(
        llm, config, EngineConfig(**{"cache_tokens": 4096, "max_requests": 8, **own})
    )
    bound = open_socket(config.host, config.port)
    server = Server(serving)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    url = "http://{}:{}".format(*bound.getsockname())
    try:
        wait_until(lambda: server.started)
        with httpx2.Client(base_url=url, timeout=60) as http:
            yield Running(serving, server, url, http)
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        serving.engine.close()
        bound.close()
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(tiny_llm: LLM) -> Iterator[Running]:
    with running(tiny_llm) as one:
        yield one


@pytest.fixture
def make_server(tiny_llm: LLM) -> Iterator[Callable[..., Running]]:
    """Servers with settings of their own."""
    with contextlib.ExitStack() as stack:
        yield lambda **config: stack.enter_context(running(tiny_llm, **config))
