"""Every kind of packed weights, with and without speculation: which combination is fastest here?

The kernel that is best for one token is not always the one that is best for a block: kinds of few
bits read less memory but work for each row. Prints tokens per second at temperature 0 of our plain
engine and of DSpark at several draft lengths for each kind, beside transformers in float32; ends
with one JSON line. All texts are written by all contenders in turn in one run.

    python benchmarks/weights.py --files PROMPT_FOLDER --limit 1 --kind bf16 --kind q4
"""

from typing import Any

from common import Contender, engine_contender, finish, interleave, parser, rate, setup
from single_stream import transformers_contender

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.nn.linear import KINDS
from dspark.recipes.progress import Progress


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__ or "")
    options.add_argument(
        "--kind", action="append", choices=KINDS, help="default: all that run here"
    )
    options.add_argument(
        "--policy", action="append", help="beside off (default: fixed:2, fixed:3, fixed:4, fixed:7)"
    )
    options.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    args = options.parse_args(argv)
    policies = ["off", *(args.policy or ["fixed:2", "fixed:3", "fixed:4", "fixed:7"])]
    progress = Progress()
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=args.max_new_tokens, verification="rejection"
    )

    contenders: dict[str, Contender] = {}
    jobs = None
    for kind in args.kind or KINDS:
        args.weights = kind
        try:
            llm, own_jobs = setup(args, progress)
        except ConfigError as error:
            if args.kind:
                raise
            progress.say(f"{kind} is left out: {error}")
            continue
        jobs = jobs or own_jobs
        if not contenders and not args.no_transformers:
            contenders["transformers"] = transformers_contender(llm, args.target)
        for policy in policies if llm.drafter is not None else policies[:1]:
            contenders[f"{kind} {policy}"] = engine_contender(llm, sampling, policy)
    assert jobs is not None, "fp32 runs everywhere"
    timings = interleave(contenders, jobs, repeats=args.repeats, progress=progress)

    speeds = {name: rate(own.values()) for name, own in timings.items()}
    base = speeds.get("transformers")
    print(f"{len(jobs)} prompts, {args.max_new_tokens} tokens at most, {args.threads} threads")
    for name, speed in sorted(speeds.items(), key=lambda item: -item[1]):
        print(f"{name:16s} {speed:6.1f} tokens/s" + (f"  {speed / base:5.2f}" if base else ""))
    return {
        "prompts": len(jobs),
        "max_new_tokens": args.max_new_tokens,
        "threads": args.threads,
        "tokens_per_second": speeds,
        "over_transformers": {name: speed / base for name, speed in speeds.items()} if base else {},
    }


if __name__ == "__main__":
    finish(main)
