"""Open-loop load on a server: requests arrive at a fixed rate, whether or not it keeps up.

    python benchmarks/open_loop.py --serve "" --report docs/results/overload
    python benchmarks/open_loop.py --url http://127.0.0.1:8000 --rate 3 --seconds 300

The first starts a server of its own (`--serve` holds more arguments for `dspark serve`), measures
its capacity, offers 1.5 times as much for five minutes, and keeps the report.

Arrivals are Poisson (seeded). Every admitted stream is checked: it must end with a finish reason,
report its usage, and, since the same prompt and seed must give the same
text, equal every other stream of its pair: a mixed-up stream would not. Refusals (429, 503) must
come at once. `--rate 0` first measures what the server can do with `--concurrency` requests in
flight, and then runs at `--overload` times that. Memory is read from `--pid`, if given, or from the
server that was started. The last line is one JSON document; exit code 1 when something was lost.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PROMPTS = [
    "Explain how a bicycle stays upright.",
    "Write a function that reverses a list.",
    "What is 17 times 6? Think step by step.",
    "Describe the sea to someone who has never seen it.",
    "Name the planets, from the sun outwards.",
    "Why do leaves fall in autumn?",
]
REFUSED_AT_ONCE = 1.0
"""Seconds."""


@dataclass
class Result:
    status: int
    seconds: float
    first: float | None = None
    tokens: int = 0
    problem: str | None = None


@dataclass
class Load:
    url: str
    tokens: int
    key: str | None
    results: list[Result] = field(default_factory=list)
    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    """(prompt, seed) -> the text it gave the first time."""

    async def ask(self, prompt: int, seed: int) -> Result:
        started = time.perf_counter()
        try:
            result = await self._ask(prompt, seed, started)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            result = Result(0, 0.0, problem=f"{type(error).__name__}: {error}")
        result.seconds = time.perf_counter() - started
        self.results.append(result)
        return result

    async def _ask(self, prompt: int, seed: int, started: float) -> Result:
        parts = urlsplit(self.url)
        body = {
            "messages": [{"role": "user", "content": PROMPTS[prompt]}],
            "max_tokens": self.tokens,
            "temperature": 0.8,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            "Connection: close",
            f"Content-Length: {len(content)}",
        ]
        if self.key:
            head.append(f"Authorization: Bearer {self.key}")
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + content)
            status = int((await reader.readline()).split()[1])
            result = Result(status, 0.0)
            if status != 200:
                await reader.read()
                return result
            text, finish, usage, done = "", None, None, False
            async for line in reader:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    done = True
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    result.problem = chunk["error"]["message"]
                    return result
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    if choice["delta"].get("content"):
                        result.first = result.first or time.perf_counter() - started
                        text += choice["delta"]["content"]
                    finish = choice["finish_reason"] or finish
            if not done or finish is None or usage is None:
                result.problem = "the stream was cut"
            elif self.texts.setdefault((prompt, seed), text) != text:
                result.problem = "another text than the same request gave before"
            else:
                result.tokens = usage["completion_tokens"]
            return result
        finally:
            writer.close()


def quantile(values: list[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def memory_mib(pid: int | None) -> float | None:
    if pid is None:
        return None
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def capacity(load: Load, concurrency: int, seconds: float) -> float:
    """Requests a second with `concurrency` in flight; every one must be answered."""
    end, done = time.perf_counter() + seconds, 0

    async def worker(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            result = await load.ask(number % len(PROMPTS), done % 50)
            if result.status != 200 or result.problem:
                raise SystemExit(f"a request failed ({result.status}): {result.problem or ''}")
            done += 1

    started = time.perf_counter()
    await asyncio.gather(*(worker(i) for i in range(concurrency)))
    return done / (time.perf_counter() - started)


async def arrivals(load: Load, rate: float, seconds: float, pid: int | None) -> dict[str, Any]:
    random_ = random.Random(0)
    tasks: set[asyncio.Task[None]] = set()
    started, due, number = time.perf_counter(), 0.0, 0
    memory: list[float] = []
    while due < seconds:
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        tasks.add(asyncio.create_task(load.ask(number % len(PROMPTS), number % 50)))
        tasks = {task for task in tasks if not task.done()}
        if number % 20 == 0 and (now := memory_mib(pid)) is not None:
            memory.append(now)
        due += random_.expovariate(rate)
        number += 1
    await asyncio.gather(*tasks)
    return {"sent": number, "seconds": time.perf_counter() - started, "memory_mib": memory}


def report(load: Load, run: dict[str, Any], rate: float) -> dict[str, Any]:
    answered = [r for r in load.results if r.status == 200 and r.problem is None]
    refused = [r for r in load.results if r.status in (429, 503)]
    slow = [r for r in refused if r.seconds > REFUSED_AT_ONCE]
    problems = [r for r in load.results if r.problem or r.status not in (200, 429, 503)]
    firsts = [r.first for r in answered if r.first is not None]
    memory = run.pop("memory_mib")
    return {
        "rate": rate,
        **run,
        "answered": len(answered),
        "refused": len(refused),
        "refused_late": len(slow),
        "problems": [f"{r.status} {r.problem}" for r in problems][:10],
        "lost": run["sent"] - len(load.results) + len(problems),
        "tokens_per_second": sum(r.tokens for r in answered) / run["seconds"],
        "first_token_seconds": {q: quantile(firsts, q / 100) for q in (50, 95, 99)},
        "request_seconds": {q: quantile([r.seconds for r in answered], q / 100) for q in (50, 95)},
        "refusal_seconds_most": max((r.seconds for r in refused), default=None),
        "memory_mib": [memory[0], max(memory), memory[-1]] if memory else None,
    }


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    load = Load(arguments.url, arguments.tokens, arguments.key)
    rate = arguments.rate
    if not rate:
        measured = await capacity(load, arguments.concurrency, arguments.warm_up)
        rate = arguments.overload * measured
        print(f"capacity {measured:.2f} requests/s; offering {rate:.2f}", flush=True)
        load.results.clear()
    return report(load, await arrivals(load, rate, arguments.seconds, arguments.pid), rate)


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return int(answer.status) == 200
    except OSError:
        return False


@contextlib.contextmanager
def served(arguments: str) -> Iterator[tuple[str, int]]:
    """Starts `dspark serve`; its address and process id."""
    program = [sys.executable, "-c", "from dspark.cli.main import main; main()", "serve"]
    command = [*program, "--port", "0", *shlex.split(arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r" at (http://\S+)/v1", line):
                    break
            else:
                raise SystemExit(f"the server did not start: {''.join(said)}")
            # Its log is read to the end, or it would wait for a reader.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            while not ready(found[1]) and process.poll() is None:
                time.sleep(0.1)
            yield found[1], process.pid
        finally:
            process.terminate()


def keep(document: dict[str, Any], path: Path, command: str) -> None:
    """The report as PATH.json and PATH.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    rows = "".join(f"| {name} | {value} |\n" for name, value in document.items())
    text = f"# Open-loop load\n\n`{command}`\n\n| | |\n|---|---|\n{rows}"
    path.with_suffix(".md").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default=None)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second")
    parser.add_argument("--overload", type=float, default=1.5)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--warm-up", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pid", type=int, default=None, help="the server's, for its memory")
    parser.add_argument("--serve", default=None, metavar="ARGS", help="start a server with these")
    parser.add_argument("--report", type=Path, default=None, metavar="PATH", help="PATH.json, .md")
    given = parser.parse_args()
    if given.serve is None:
        document = asyncio.run(run(given))
    else:
        with served(given.serve) as (given.url, given.pid):
            document = asyncio.run(run(given))
    if given.report is not None:
        keep(document, given.report, shlex.join(["python", *sys.argv]))
    for name, value in document.items():
        print(f"{name:22} {value}")
    print(json.dumps(document, separators=(",", ":")))
    return 1 if document["lost"] or document["refused_late"] else 0


if __name__ == "__main__":
    sys.exit(main())
