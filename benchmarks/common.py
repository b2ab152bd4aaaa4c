"""What the benchmarks share: domains, options, timings added up, and what becomes of an error."""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.core.errors import DSparkError
from dspark.core.records import StepRecord
from dspark.core.sampling import SamplingParams
from dspark.recipes.closed_loop import closed_loop
from dspark.recipes.llm import LLM
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job, gather_prompts, make_jobs
from dspark.recipes.values import weights_value

DOMAINS = {
    "gsm8k": "math", "math500": "math", "aime24": "math", "aime25": "math",
    "humaneval": "code", "mbpp": "code", "livecodebench": "code",
    "mt-bench": "chat", "arena-hard-v2": "chat",
}  # fmt: skip
"""Stem of a prompt file -> domain; a file that is not listed is a domain of its own."""


@dataclass(slots=True)
class Timing:
    """One text of a contender, or several added up."""

    tokens: int = 0
    seconds: float = 0.0
    records: tuple[StepRecord, ...] = ()
    """Of our engine; nothing for others."""

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.records + other.records,
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


Contender = Callable[[Job], Timing]

Timings = dict[str, dict[str, Timing]]
"""Contender -> domain -> timing."""


def interleave(
    contenders: dict[str, Contender],
    jobs: Sequence[Job],
    *,
    repeats: int,
    progress: Progress,
) -> Timings:
    """Lets every contender write every text, one after the other, each time starting with another.

    So a machine that drifts slows all contenders alike. The first job is run once before anything
    counts.
    """
    timings: Timings = {name: defaultdict(Timing) for name in contenders}
    names = [*contenders]
    for contender in contenders.values():
        contender(jobs[0])
    with progress.task("texts", total=repeats * len(jobs) * len(names)) as advance:
        for number, job in enumerate([*jobs] * repeats):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                timings[name][DOMAINS.get(job.domain, job.domain)] += contenders[name](job)
                advance(1, f"{job.domain}, {name}")
    return timings


def ratios(timings: Timings, ours: str, theirs: str) -> dict[str, float]:
    """Tokens per second of `ours` over those of `theirs`, by domain and for all together."""
    domains = timings[ours]
    result = {
        domain: timings[ours][domain].tokens_per_second / timings[theirs][domain].tokens_per_second
        for domain in domains
    }
    return {**result, "all": rate(timings[ours].values()) / rate(timings[theirs].values())}


def rate(timings: Iterable[Timing]) -> float:
    return sum(timings, Timing()).tokens_per_second


def engine_contender(llm: LLM, sampling: SamplingParams, policy: str) -> Contender:
    """Our engine, one request at a time, with the job's prompt and seed and this sampling."""
    chosen = llm.policies.resolve(policy)

    def run(job: Job) -> Timing:
        result = closed_loop(llm, [job.with_sampling(sampling)], chosen, concurrency=1)
        return Timing(result.tokens, result.seconds, result.records)

    return run


def parser(doc: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--files", nargs="+", type=Path, metavar="PATH",
        help="prompt files or folders, of which validation prompts are used (default: shipped)",
    )  # fmt: skip
    options.add_argument("--limit", type=int, default=4, help="prompts per file (default: 4)")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--repeats", type=int, default=1, help="visits of every prompt")
    options.add_argument("--target", help="default: the embedded model")
    options.add_argument(
        "--draft", default="auto", help="draft bundle, or none (default: the shipped one)"
    )
    options.add_argument("--draft-length", type=int, help="draft tokens a round, at most")
    options.add_argument("--weights", help="packed CPU weights (default: what suits the processor)")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--seed", type=int, default=0)
    return options


def setup(args: argparse.Namespace, progress: Progress) -> tuple[LLM, list[Job]]:
    llm = LLM(
        args.target,
        draft=None if args.draft == "none" else args.draft,
        draft_length=args.draft_length,
        weights=weights_value(args.weights),
        threads=args.threads,
        progress=progress,
    )
    prompts = gather_prompts(args.files, limit=args.limit, say=progress.say)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=args.max_new_tokens)
    return llm, make_jobs(llm, prompts, sampling, seed=args.seed, say=progress.say)


def finish(run: Callable[[], dict[str, Any]]) -> None:
    """Runs a benchmark; its result is the last line of standard output, an error one line."""
    try:
        print(json.dumps(run(), separators=(",", ":"), allow_nan=False))
    except DSparkError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(error.exit_code)
