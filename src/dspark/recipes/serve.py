"""A server over a loaded target and drafter."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import psutil
import torch

from dspark import __version__
from dspark.core.errors import MissingExtraError
from dspark.core.records import StepRecord
from dspark.data.template import takes_tools
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.service import EngineService
from dspark.recipes.llm import LLM
from dspark.server.config import ServerConfig

if TYPE_CHECKING:
    from dspark.server.serving import Serving

Say = Callable[[str], None]
_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")


def require_serve_extra() -> None:
    """MissingExtraError where a package of the extra `serve` is not installed."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "serve")


def build_serving(llm: LLM, config: ServerConfig, engine_config: EngineConfig) -> "Serving":
    """Starts the engine's thread; `serving.engine.close()` stops it."""
    require_serve_extra()
    from dspark.server.auth import ApiKeys
    from dspark.server.limits import KeyLimits
    from dspark.server.live import LiveView
    from dspark.server.metrics import ServerMetrics
    from dspark.server.rounds import RoundNotes
    from dspark.server.serving import Serving

    keys = ApiKeys.load(config.api_keys)
    metrics, live, notes = ServerMetrics(), LiveView(), RoundNotes()

    def on_record(record: StepRecord) -> None:
        notes.observe(record)
        metrics.observe(record)
        live.observe(record)

    tokenizer = llm.tokenizer
    engine = Engine(
        llm.loaded.target,
        llm.drafter,
        llm.policy,
        engine_config,
        calibration=llm.calibration,
        tokenizer=tokenizer,
    )
    serving = Serving(
        name=config.model_name or llm.loaded.name,
        engine=EngineService(engine, on_record=on_record),
        tokenizer=tokenizer,
        encode_chat=llm.encode_messages,
        takes_tools=takes_tools(tokenizer),
        config=config,
        keys=keys,
        limits=KeyLimits(
            requests_per_minute=config.requests_per_minute,
            concurrent_requests=config.concurrent_requests,
        ),
        metrics=metrics,
        live=live,
        notes=notes,
        about=about(llm),
        created=int(time.time()),
    )
    metrics.watch(serving.stats)
    return serving


def about(llm: LLM) -> dict[str, Any]:
    """What runs, for people and for the page."""
    return {
        "version": __version__,
        "target": llm.loaded.name,
        "drafter": llm.draft_name,
        "policy": llm.policy.name,
        "weights": llm.loaded.weights or "own",
        "threads": torch.get_num_threads(),
    }


def serve(
    load: Callable[[], LLM], config: ServerConfig, engine_config: EngineConfig, say: Say
) -> None:
    """Serves until SIGTERM or Ctrl-C. Binds before the model is loaded, so that a port that is
    taken is told at once.

    Raises ConfigError for an address that cannot be had, KeyboardInterrupt after Ctrl-C.
    """
    require_serve_extra()
    from dspark.server.logs import start_logging
    from dspark.server.run import open_socket, run

    with open_socket(config.host, config.port) as bound:
        serving = build_serving(load(), config, engine_config)
        try:
            for line in start_lines(serving, *bound.getsockname()[:2]):
                say(line)
            start_logging()
            run(serving, [bound])
        finally:
            serving.engine.close()


def start_lines(serving: "Serving", host: str, port: int) -> list[str]:
    """What is running, where, and who may use it."""
    facts, engine = serving.about, serving.engine.engine
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    local = host in ("127.0.0.1", "::1")
    if serving.keys:
        access = "API keys are checked"
    elif local:
        access = "no API keys: open to everyone on this machine"
    else:
        access = "NO API KEYS, and not bound to this machine only: anyone who reaches it may use it"
    stats = serving.stats()
    memory = psutil.Process().memory_info().rss / 2**30
    return [
        f"target    {facts['target']}, {facts['weights']} weights, {facts['threads']} threads",
        f"drafter   {facts['drafter'] or 'none'}, policy {facts['policy']}",
        f"cache     {stats.pages * stats.page_size} tokens in {stats.pages} pages; "
        f"up to {engine.config.max_requests} requests at once; context {serving.max_context}",
        f"memory    {memory:.2f} GiB resident",
        f"access    {access}",
        f"serving   {serving.name!r} at {url}/v1, live page at {url}/",
    ]
