"""What the server costs: tokens a second of the engine alone and of the same engine through HTTP.

    python benchmarks/server_overhead.py --streams 32 --tokens 64 --repeats 3

Both write the same texts (same prompts, seeds and lengths) with the same loaded target and drafter,
in turn, `--repeats` times; medians are compared. The HTTP clients are a process of their own, which
shares the cores, so the figure holds what they take, too. The last line is one JSON document.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import threading
import time
from typing import Any

from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.recipes.llm import LLM
from dspark.recipes.serve import ServerConfig, build_serving
from dspark.server.run import Server, open_socket
from dspark.server.serving import Serving

PROMPTS = [
    "Explain how a bicycle stays upright.",
    "Write a function that reverses a list.",
    "What is 17 times 6? Think step by step.",
    "Describe the sea to someone who has never seen it.",
]


def messages(stream: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": PROMPTS[stream % len(PROMPTS)]}]


def engine_alone(serving: Serving, streams: int, tokens: int) -> float:
    """Seconds for all streams, submitted at once and read in threads."""
    params = [
        SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=i) for i in range(streams)
    ]
    prompts = [list(serving.encode_chat(messages(i), None)) for i in range(streams)]
    started = time.perf_counter()
    open_streams = [
        serving.engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)
    ]
    for stream in open_streams:
        for event in stream:
            assert event.finished in (None, "length"), event
    return time.perf_counter() - started


async def read_stream(host: str, port: int, stream: int, tokens: int) -> None:
    body = json.dumps(
        {
            "messages": messages(stream),
            "max_tokens": tokens,
            "seed": stream,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    answer = await reader.read()
    writer.close()
    assert b"data: [DONE]" in answer and b'"finish_reason":"length"' in answer, answer[:300]


def clients(connection: Any, host: str, port: int) -> None:
    """The clients' process: runs one round of streams for every (streams, tokens) it is sent."""

    async def round_of(streams: int, tokens: int) -> None:
        await asyncio.gather(*(read_stream(host, port, i, tokens) for i in range(streams)))

    while (job := connection.recv()) is not None:
        started = time.perf_counter()
        asyncio.run(round_of(*job))
        connection.send(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target", default=None)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--policy", default=None)
    arguments = parser.parse_args()

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    llm = LLM(arguments.target, draft=arguments.draft, policy=arguments.policy)
    engine_config = EngineConfig(max_requests=arguments.streams)
    serving = build_serving(llm, ServerConfig(port=0), engine_config)
    with open_socket("127.0.0.1", 0) as bound:
        host, port = bound.getsockname()
        server = Server(serving)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        process = multiprocessing.get_context("spawn").Process(
            target=clients, args=(theirs, host, port), daemon=True
        )
        process.start()
        job = (arguments.streams, arguments.tokens)
        seconds: dict[str, list[float]] = {"engine": [], "server": []}

        def through_server() -> float:
            ours.send(job)
            return float(ours.recv())

        engine_alone(serving, *job)  # once for nothing: caches, tuning
        through_server()
        for repeat in range(arguments.repeats):
            order = ["engine", "server"] if repeat % 2 == 0 else ["server", "engine"]
            for name in order:
                taken = engine_alone(serving, *job) if name == "engine" else through_server()
                seconds[name].append(taken)
                print(f"{name}: {arguments.streams * arguments.tokens / taken:.1f} tokens/s")
        ours.send(None)
        server.should_exit = True
        thread.join()
    rates = {
        name: arguments.streams * arguments.tokens / statistics.median(taken)
        for name, taken in seconds.items()
    }
    overhead = 1.0 - rates["server"] / rates["engine"]
    print(f"overhead of the server: {overhead:.1%} of throughput at {arguments.streams} streams")
    print(
        json.dumps(
            {
                "streams": arguments.streams,
                "tokens": arguments.tokens,
                "engine_tokens_per_second": rates["engine"],
                "server_tokens_per_second": rates["server"],
                "overhead": overhead,
                "seconds": seconds,
            },
            separators=(",", ":"),
        )
    )


if __name__ == "__main__":
    main()
