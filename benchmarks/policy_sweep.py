"""Every policy at every batch size, on math, code and chat prompts mixed, in one run.

Batches of 1 .. 32 requests in flight decode under `off`, `fixed:1` .. `fixed:7`, `threshold:0.5`,
`early`, `async` and `marginal`, with `rejection` verification at temperature 1; --coupled runs the
same and `global` under `coupled`, the one rule that `global` is lossless under. All take turns,
each round starting with another. Where no cost table fits, this machine is profiled first.

Prints, for every batch size, tokens per second over those of `off`, by the clock and once more in
the seconds of the cost table (what was decided, whatever the machine did meanwhile), and `async`
over the best other choice (goal: at least 0.97); over the whole sweep the geometric mean of each
policy's ratios; and the verification budget per request against load (the paper's figure 8), drawn
with --plot.

    python benchmarks/policy_sweep.py --files PROMPT_FOLDER --plot figure8.png
"""

import math
from pathlib import Path
from typing import Any

from common import finish, parser, setup

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.evaluation.figures import check_figure, save_figure
from dspark.recipes.bench import Bench, bench
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import gather_prompts
from dspark.recipes.values import check_file

CONCURRENCIES = [1, 2, 4, 8, 16, 32]


def policies_of(block_size: int, *, coupled: bool) -> list[str]:
    fixed = [f"fixed:{length}" for length in range(1, block_size + 1)]
    own = ["threshold:0.5", "early", "async", "marginal"]
    return ["off", *fixed, *own, *(["global"] if coupled else [])]


def ratios(result: Bench, *, modelled: bool = False) -> dict[int, dict[str, float]]:
    """Concurrency -> policy -> throughput over that of off: a median of rounds, or as the cost
    table has it (`BenchRow.modelled`)."""
    found: dict[int, dict[str, float]] = {}
    for row in result.rows:
        ratio = row.modelled if modelled else row.speedup
        found.setdefault(row.concurrency, {})[row.policy] = ratio or math.nan
    return found


def against_best(own: dict[str, float], policy: str) -> float:
    """A policy over the best other one."""
    return own[policy] / max(value for name, value in own.items() if name != policy)


def print_report(result: Bench, *, modelled: bool = False) -> None:
    table = ratios(result, modelled=modelled)
    names = [*next(iter(table.values()))]
    budgets = {(row.policy, row.concurrency): row.verified_per_request for row in result.rows}
    how = "by the cost table, decoding alone" if modelled else "by the clock"
    print(f"{result.verification}, tokens per second over off {how}, and verified rows a request:")
    print("policy".ljust(14), *(f"{count:>12}" for count in table), "   all")
    for name in names:
        cells = [f"{own[name]:6.2f} ({budgets[name, count]:.1f})" for count, own in table.items()]
        mean = math.exp(sum(math.log(own[name]) for own in table.values()) / len(table))
        print(name.ljust(14), *(f"{cell:>12}" for cell in cells), f"{mean:6.3f}")
    if "async" in names:
        cells = [f"{against_best(own, 'async'):.3f}" for own in table.values()]
        print("async / best other", *cells)


def draw(result: Bench, path: Path) -> None:
    """Verification budget per request against load."""
    check_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row.policy for row in result.rows):
        own = [row for row in result.rows if row.policy == name]
        axes.plot(
            [row.concurrency for row in own],
            [row.verified_per_request for row in own],
            marker=None if name.startswith("fixed") else "o",
            linewidth=0.7 if name.startswith("fixed") else 1.6,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="requests in flight", ylabel="verified rows per request and round")
    axes.legend(fontsize="x-small", ncols=2)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__ or "")
    options.set_defaults(repeats=3)
    options.add_argument("--policy", action="append", help="default: all; repeatable")
    options.add_argument("--concurrency", type=int, action="append", help="default: 1, 2, .. 32")
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--coupled", action="store_true", help="coupled verification, and global")
    options.add_argument("--plot", type=Path, help="draw figure 8 into this file")
    args = options.parse_args(argv)
    if args.plot is not None:
        check_file(args.plot, figure=True)
    progress = Progress()
    llm, _ = setup(args, progress)
    if llm.drafter is None:
        raise ConfigError("there is no drafter to measure; give a bundle with --draft")
    result = bench(
        llm,
        gather_prompts(args.files, limit=args.limit, say=progress.say),
        SamplingParams(
            temperature=args.temperature,
            max_new_tokens=args.max_new_tokens,
            verification="coupled" if args.coupled else "rejection",
        ),
        policies=args.policy or policies_of(llm.drafter.block_size, coupled=args.coupled),
        concurrencies=args.concurrency or CONCURRENCIES,
        rounds=args.repeats,
        seed=args.seed,
        progress=progress,
    )
    print_report(result)
    if any(row.modelled is not None for row in result.rows):
        print_report(result, modelled=True)
    if args.plot is not None:
        draw(result, args.plot)
    names = {row.policy for row in result.rows}
    return {
        **result.to_json(),
        "over_off": {str(count): own for count, own in ratios(result).items()},
        "async_over_best": {
            str(count): against_best(own, "async")
            for count, own in ratios(result).items()
            if "async" in names and len(names) > 1
        },
    }


if __name__ == "__main__":
    finish(main)
