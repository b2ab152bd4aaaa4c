"""Memory under load: short and long requests for minutes; is it flat, does every page come back?

Random prompts of 8 to --longest tokens, --concurrency at a time, with the bundle's policy, in a
cache so small (--cache-tokens) that requests are preempted. Prints resident memory and pages a few
times a minute and, at the end, how much memory the last half of the time added and whether every
page is free; exit code 1 if one is not. Ends with one JSON line.

    python benchmarks/memory.py --seconds 300
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import finish, parser, setup
from open_loop import memory_mib

from dspark.core.errors import DSparkError
from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.recipes.progress import Progress


def resident_mib() -> float:
    """Of this process."""
    if not Path("/proc/self/statm").exists():
        raise DSparkError("resident memory is read from /proc, which this system does not have")
    found = memory_mib(os.getpid())
    assert found is not None
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__ or "")
    options.set_defaults(max_new_tokens=48)
    options.add_argument("--seconds", type=float, default=300)
    options.add_argument("--concurrency", type=int, default=16)
    options.add_argument("--longest", type=int, default=512, help="prompt tokens")
    options.add_argument("--cache-tokens", type=int, default=4096, help="the cache's size")
    options.add_argument("--every", type=float, default=15, help="seconds between two lines")
    args = options.parse_args(argv)
    llm, _ = setup(args, Progress())
    config = EngineConfig(cache_tokens=args.cache_tokens, max_requests=args.concurrency)
    engine = Engine(llm.loaded.target, llm.drafter, llm.policy, config)
    generator = np.random.default_rng(args.seed)
    started = time.perf_counter()
    finished, shown = 0, -args.every
    samples: list[tuple[float, float]] = []
    while (now := time.perf_counter() - started) < args.seconds or not engine.idle:
        while now < args.seconds and len(engine.running) + engine.stats().waiting < (
            2 * args.concurrency
        ):
            length = int(generator.integers(8, args.longest + 1))
            prompt = generator.integers(0, llm.loaded.target.vocab_size, length).tolist()
            tokens = int(generator.integers(1, args.max_new_tokens + 1))
            engine.add(prompt, SamplingParams(max_new_tokens=tokens))
        finished += sum(event.finished is not None for event in engine.step())
        engine.records.clear()
        if now - shown >= args.every:
            shown, stats = now, engine.stats()
            samples.append((now, resident_mib()))
            print(
                f"{now:6.0f} s  {samples[-1][1]:8.1f} MiB  {finished} done  "
                f"{stats.pages - stats.pages_free} of {stats.pages} pages in use  "
                f"{stats.preemptions} preemptions",
                flush=True,
            )
    stats = engine.stats()
    samples.append((now, resident_mib()))
    late = [mib for seconds, mib in samples if seconds >= args.seconds / 2]
    result = {
        "requests": finished,
        "seconds": now,
        "preemptions": stats.preemptions,
        "pages_in_use": stats.pages - stats.pages_free,
        "resident_mib": samples[-1][1],
        "second_half_added_mib": late[-1] - late[0],
    }
    print(f"{finished} requests; the second half added {result['second_half_added_mib']:.1f} MiB")
    if result["pages_in_use"]:
        sys.exit(f"{result['pages_in_use']} pages did not come back")
    return result


if __name__ == "__main__":
    finish(main)
