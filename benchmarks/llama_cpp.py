"""Our engine against llama.cpp on the same GGUF file, one request at a time, greedy.

Prints tokens per second of llama.cpp (plain, the file's own quantisation), of our engine without a
drafter, and of DSpark where there is a drafter; the ratios ours / llama.cpp by domain; and ends
with one JSON line. Prompts are the same token ids, thread counts are equal, timings include the
prompt, and every text is written by all in turn. llama.cpp is the one in the PyPI wheel of
`xllamacpp`, which is built to run anywhere: without AVX-512 and AMX. One built for the machine may
be faster.

    pip install 'dspark[bench]'
    python benchmarks/llama_cpp.py --files PROMPT_FOLDER
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    Contender,
    Timing,
    engine_contender,
    finish,
    interleave,
    parser,
    rate,
    ratios,
    setup,
)

from dspark.core.errors import ConfigError, DSparkError, MissingExtraError
from dspark.core.sampling import SamplingParams
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job
from dspark.targets.embedded import embedded_gguf


def llama_cpp_server(gguf: Path, *, context: int, slots: int, threads: int) -> Any:
    """llama.cpp's own server, inside this process: `slots` requests of `context` tokens at once."""
    try:
        import xllamacpp
    except ImportError:
        raise MissingExtraError("xllamacpp", "bench") from None
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = context * slots
    params.n_parallel = slots
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.port = 0  # any free one
    params.verbosity = -1
    return xllamacpp.Server(params)


def llama_cpp_contender(gguf: Path, jobs: Sequence[Job], threads: int) -> Contender:
    """One slot, no prompt cache."""
    context = max(len(job.prompt) + job.params.max_new_tokens for job in jobs) + 8
    server = llama_cpp_server(gguf, context=context, slots=1, threads=threads)

    def run(job: Job) -> Timing:
        started = time.perf_counter()
        answer = server.handle_completions(
            {
                "prompt": [*job.prompt],
                "n_predict": job.params.max_new_tokens,
                "temperature": 0.0,
                "cache_prompt": False,
            }
        )
        seconds = time.perf_counter() - started
        if "usage" not in answer:
            raise DSparkError(f"llama.cpp failed: {answer}")
        return Timing(answer["usage"]["completion_tokens"], seconds)

    return run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parser(__doc__ or "").parse_args(argv)
    if args.target is not None and not args.target.endswith(".gguf"):
        raise ConfigError(f"the target {args.target} is not a GGUF file, what llama.cpp reads")
    gguf = embedded_gguf() if args.target is None else Path(args.target)
    progress = Progress()
    llm, jobs = setup(args, progress)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=args.max_new_tokens)
    contenders = {
        "llama.cpp": llama_cpp_contender(gguf, jobs, args.threads),
        "plain": engine_contender(llm, sampling, "off"),
    }
    if llm.drafter is not None:
        contenders["dspark"] = engine_contender(llm, sampling, f"fixed:{llm.drafter.block_size}")
    timings = interleave(contenders, jobs, repeats=args.repeats, progress=progress)

    print(
        f"{gguf.name}, ours with {llm.loaded.weights} weights, drafter {llm.draft_name or 'none'}"
    )
    print(f"{len(jobs)} prompts, {args.max_new_tokens} tokens at most, {args.threads} threads")
    result: dict[str, Any] = {
        "gguf": gguf.name,
        "weights": llm.loaded.weights,
        "drafter": llm.draft_name,
        "prompts": len(jobs),
        "max_new_tokens": args.max_new_tokens,
        "threads": args.threads,
        "tokens_per_second": {name: rate(own.values()) for name, own in timings.items()},
    }
    for name, own in timings.items():
        print(f"{name}: {rate(own.values()):.1f} tokens/s")
    for name in [*timings][1:]:
        over = ratios(timings, name, "llama.cpp")
        result[f"{name}_over_llama_cpp"] = over
        print(f"{name} / llama.cpp:", ", ".join(f"{d} {value:.2f}" for d, value in over.items()))
    return result


if __name__ == "__main__":
    finish(main)
