"""What context costs: a decoding round against 128 to 8,192 tokens in the cache, drafter included.

At every length the same text of random tokens is read and then continued, without a drafter and
with one, in turn. Prints the median round in milliseconds, the draft's part of it, the tokens per
second, and the time to the first token of both, whose ratio is what capturing features and filling
the drafter's context adds to prefill (goal: at most 1.10). Ends with one JSON line.

    python benchmarks/context_cost.py --length 128 --length 1024 --length 4096
"""

from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np
from common import finish, parser, setup

from dspark.core.errors import ConfigError
from dspark.core.records import StepRecord
from dspark.core.sampling import SamplingParams
from dspark.recipes.closed_loop import LoadResult, closed_loop
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job

LENGTHS = [128, 512, 2048, 4096, 8192]


def rounds(result: LoadResult) -> list[StepRecord]:
    return [record for record in result.records if not record.prefill_tokens]


def round_ms(result: LoadResult) -> float:
    return 1000 * median(sum(record.seconds.values()) for record in rounds(result))


def draft_ms(result: LoadResult) -> float:
    return 1000 * median(
        record.seconds["draft"] + record.seconds["draft_head"] for record in rounds(result)
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__ or "")
    options.set_defaults(max_new_tokens=32, repeats=3)
    options.add_argument("--length", type=int, action="append", help="default: 128 .. 8192")
    options.add_argument("--policy", help="of the drafter (default: the bundle's)")
    args = options.parse_args(argv)
    progress = Progress()
    llm, _ = setup(args, progress)
    if llm.drafter is None:
        raise ConfigError("there is no drafter to measure; give a bundle with --draft")
    most = llm.loaded.target.max_context - args.max_new_tokens
    # The longest may be the target's whole context: what is written has to fit, too.
    lengths = sorted({min(length, most) for length in args.length or LENGTHS})
    policies = {"plain": "off", "dspark": args.policy or llm.policies.default}
    sampling = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    generator = np.random.default_rng(args.seed)
    results: dict[int, dict[str, list[LoadResult]]] = {n: defaultdict(list) for n in lengths}
    with progress.task("texts", total=len(lengths) * args.repeats * 2) as advance:
        for number in range(args.repeats):
            names = [*policies][:: 1 if number % 2 else -1]
            for length in lengths:
                tokens = generator.integers(0, llm.loaded.target.vocab_size, length).tolist()
                job = Job("random", length, number, tuple(tokens), sampling)
                for name in names:
                    policy = llm.policies.resolve(policies[name])
                    results[length][name].append(closed_loop(llm, [job], policy, concurrency=1))
                    advance(1, f"{name} at {length}")
    print(f"{llm.loaded.name}, {llm.loaded.weights} weights, drafter {llm.draft_name}")
    print("context   plain ms   dspark ms   of it draft   first token, ms: plain, dspark, ratio")
    table = {}
    for length, own in results.items():
        plain, ours = own["plain"], own["dspark"]
        ratio = median(b.ttft[0] / a.ttft[0] for a, b in zip(plain, ours, strict=True))
        row = {
            "plain_ms": median(map(round_ms, plain)),
            "dspark_ms": median(map(round_ms, ours)),
            "draft_ms": median(map(draft_ms, ours)),
            "plain_ttft_ms": 1000 * median(result.ttft[0] for result in plain),
            "dspark_ttft_ms": 1000 * median(result.ttft[0] for result in ours),
            "ttft_ratio": ratio,
        }
        table[length] = row
        print(
            f"{length:7d} {row['plain_ms']:10.1f} {row['dspark_ms']:11.1f} {row['draft_ms']:13.1f}"
            f"   {row['plain_ttft_ms']:.0f}, {row['dspark_ttft_ms']:.0f}, {ratio:.2f}"
        )
    return {"weights": llm.loaded.weights, "policy": policies["dspark"], "context": table}


if __name__ == "__main__":
    finish(main)
