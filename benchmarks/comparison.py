"""DSpark, DFlash, Eagle3, MTP-1 and prompt lookup on one target: the paper's comparison, small.

Trains every contender on the same responses with the same number of passes, decodes the same
held-out prompts under `rejection` at temperatures 1 and 0, and writes `comparison.json` and
`comparison.md`: accepted length by domain with intervals over prompts, conditional acceptance by
position with intervals (figure 2 of the paper), training time beside it; and ends with one JSON
line.

    python benchmarks/comparison.py --prompts PROMPTS --responses responses.jsonl --work WORK
    python benchmarks/comparison.py ... --only dspark --max-seconds 1800   # a piece; run it again

Every contender has a folder in the work folder. What is finished there is not done again, so the
comparison may be made in pieces and in any order; the last call writes what there is. The responses
are those a `dspark train` run wrote (RUN/responses.jsonl) to the training prompts of the same
files.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from common import DOMAINS, finish

from dspark.data.prompts import read_prompts
from dspark.data.responses import ResponseFile
from dspark.data.template import template_hash
from dspark.recipes.comparison import (
    CONTENDERS,
    ComparisonConfig,
    evaluate_contender,
    gather,
    train_contender,
)
from dspark.recipes.comparison_report import report
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import gather_prompts
from dspark.recipes.values import set_threads, weights_value
from dspark.targets.load import load_target


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ComparisonConfig()
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, metavar="PATH")
    parser.add_argument("--responses", type=Path, required=True, metavar="FILE")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=[*CONTENDERS], default=[*CONTENDERS])
    parser.add_argument("--skip-evaluation", action="store_true", help="train only")
    parser.add_argument("--max-seconds", type=float, help="of training each contender, this time")
    parser.add_argument("--limit", type=int, help="held-out prompts per file (default: all)")
    parser.add_argument("--passes", type=float, default=default.passes)
    parser.add_argument("--anchors-per-sequence", type=int, default=default.anchors_per_sequence)
    parser.add_argument("--anchors-per-step", type=int, default=default.anchors_per_step)
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--taps", type=int, default=default.taps)
    parser.add_argument("--block-size", type=int, default=default.block_size)
    parser.add_argument("--start", choices=["target", "noise"], default=default.start)
    parser.add_argument("--max-new-tokens", type=int, default=default.max_new_tokens)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--target", help="default: the embedded model")
    parser.add_argument("--weights", help="packed CPU weights (default: what suits the processor)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--max-requests", type=int, default=16, help="texts decoded at once")
    return parser


def main(arguments: list[str]) -> dict[str, Any]:
    args = options().parse_args(arguments)
    progress = Progress()
    set_threads(args.threads)
    config = ComparisonConfig(
        passes=args.passes,
        anchors_per_sequence=args.anchors_per_sequence,
        anchors_per_step=args.anchors_per_step,
        layers=args.layers,
        taps=args.taps,
        block_size=args.block_size,
        start=args.start,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
    )
    prompts = read_prompts(*args.prompts)
    held_out = gather_prompts(args.prompts, limit=args.limit, say=progress.say)
    weights = weights_value(args.weights)
    loaded = load_target(
        args.target, weights=weights, template_hash=template_hash,
        init_layers=max(1, args.layers), say=progress.say,
    )  # fmt: skip
    responses = ResponseFile(
        args.responses,
        target=loaded.name,
        template_hash=loaded.binding.chat_template_hash,
        vocab_size=loaded.target.vocab_size,
    )
    llm_options = {"weights": weights, "max_requests": args.max_requests}
    for name in args.only:
        progress.say(f"{name}:")
        done = train_contender(
            name, loaded, prompts, responses, config, args.work, progress,
            max_seconds=args.max_seconds,
        )  # fmt: skip
        if not done:
            progress.say(f"{name}: stopped; run the same command again to go on")
        elif not args.skip_evaluation:
            evaluate_contender(
                name, args.target, held_out, config, args.work, progress,
                domain_of=lambda stem: DOMAINS.get(stem, stem), llm_options=llm_options,
            )  # fmt: skip
    document = gather(config, args.work)
    report(document, args.output)
    return {"output": str(args.output), "contenders": [*document["contenders"]]}


if __name__ == "__main__":
    finish(lambda: main(sys.argv[1:]))
