"""What the server costs: tokens a second of the engine alone and of the same engine through HTTP.

    python benchmarks/server_overhead.py --streams 32 --tokens 64 --repeats 3

Both write the same texts (same prompts, seeds and lengths) with the same loaded target and drafter,
in turn, `--repeats` times; medians are compared. The HTTP clients are a process of their own, which
shares the cores, so the figure holds what they take, too. The last line is one JSON document.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from sse_clients import messages

from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.recipes.llm import LLM
from dspark.recipes.serve import ServerConfig, build_serving
from dspark.server.run import Server, open_socket
from dspark.server.serving import Serving

CLIENTS = Path(__file__).parent / "sse_clients.py"


def engine_alone(serving: Serving, streams: int, tokens: int) -> float:
    """Seconds for all streams, submitted at once."""
    started = time.perf_counter()
    running = []
    for stream in range(streams):
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=stream)
        prompt = serving.encode_chat(messages(stream), None)
        running.append(serving.engine.submit(prompt, params))
    for events in running:
        assert [event.finished for event in events][-1] == "length"
    return time.perf_counter() - started


def measure(serving: Serving, streams: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Contender -> seconds of each repeat."""
    with open_socket("127.0.0.1", 0) as bound:
        server = Server(serving)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        pipe = subprocess.PIPE
        clients = subprocess.Popen(
            [sys.executable, str(CLIENTS)], stdin=pipe, stdout=pipe, text=True
        )
        assert clients.stdin is not None and clients.stdout is not None

        def through_server() -> float:
            assert clients.stdin is not None and clients.stdout is not None
            print(bound.getsockname()[1], streams, tokens, file=clients.stdin, flush=True)
            return float(clients.stdout.readline())

        seconds: dict[str, list[float]] = {"engine": [], "server": []}
        try:
            engine_alone(serving, streams, tokens)  # once for nothing: caches and tuning
            through_server()
            for repeat in range(repeats):
                for name in ("engine", "server") if repeat % 2 == 0 else ("server", "engine"):
                    alone = name == "engine"
                    taken = engine_alone(serving, streams, tokens) if alone else through_server()
                    seconds[name].append(taken)
                    print(f"{name}: {streams * tokens / taken:.1f} tokens/s", flush=True)
        finally:
            clients.stdin.close()
            clients.wait()
            clients.stdout.close()
            server.should_exit = True
            thread.join()
    return seconds


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target", default=None)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--policy", default=None)
    given = parser.parse_args(args)
    llm = LLM(given.target, draft=given.draft, policy=given.policy)
    engine_config = EngineConfig(max_requests=given.streams)
    serving = build_serving(llm, ServerConfig(port=0), engine_config)
    seconds = measure(serving, given.streams, given.tokens, given.repeats)
    rates = {
        name: given.streams * given.tokens / statistics.median(taken)
        for name, taken in seconds.items()
    }
    overhead = 1.0 - rates["server"] / rates["engine"]
    print(f"the server takes {overhead:.1%} of the throughput at {given.streams} streams")
    document = {
        "streams": given.streams,
        "tokens": given.tokens,
        "engine_tokens_per_second": rates["engine"],
        "server_tokens_per_second": rates["server"],
        "overhead": overhead,
        "seconds": seconds,
    }
    print(json.dumps(document, separators=(",", ":")))


if __name__ == "__main__":
    main()
