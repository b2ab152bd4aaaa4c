"""`dspark train`: a drafter for a target, from on-policy responses."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dspark.cli import options
from dspark.cli.output import Screen, print_note


def train(
    prompts: Annotated[
        list[Path],
        typer.Option(
            metavar="PATH",
            help="Prompts: a jsonl or parquet file (turns, prompt, messages or conversations), a "
            "saved dataset, or a folder of these. Repeatable.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the bundle to write.")],
    run: Annotated[
        Path, typer.Option(help="Folder of the run: responses, features, resumable state.")
    ],
    target: options.Target = None,
    drafter: Annotated[
        str,
        typer.Option(help="What to train: dspark, dspark-gated, dspark-rnn, dflash, eagle3, mtp."),
    ] = "dspark",
    objective: Annotated[
        str,
        typer.Option(
            help="The loss: own, the drafter's paper's; or dspark, to compare drafters at one loss."
        ),
    ] = "own",
    steps: Annotated[int, typer.Option(help="Training steps, of 256 blocks each.")] = 4000,
    max_seconds: Annotated[
        float | None,
        typer.Option(help="Stop after this long; run again to resume.", show_default=False),
    ] = None,
    layers: Annotated[int, typer.Option(help="Draft layers; eagle3 and mtp have one.")] = 3,
    block_size: Annotated[int, typer.Option(help="Draft tokens per block; mtp has one.")] = 7,
    taps: Annotated[int, typer.Option(help="Target layers the drafter listens to.")] = 5,
    markov_rank: Annotated[int, typer.Option(help="Rank of the Markov head.")] = 64,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Propose only the so many tokens most frequent in the responses. Default: any.",
            show_default=False,
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 6e-4,
    warm_start: Annotated[
        Path | None,
        typer.Option(
            help="A bundle to start from. Default: the target's last layers.", show_default=False
        ),
    ] = None,
    from_noise: Annotated[
        bool,
        typer.Option(
            "--from-noise",
            help="Start from random weights: for targets whose layers no draft layer can copy.",
        ),
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad prompt lines out, and say how many.")
    ] = False,
    generate: Annotated[
        bool,
        typer.Option(
            "--generate/--no-generate",
            help="Let the target write the responses that the run lacks, or use those there are.",
        ),
    ] = True,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest response to train on, in tokens.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Of anchors, order and fresh weights.")] = 42,
    parallel: Annotated[
        str,
        typer.Option(
            help="How several processes, started by torchrun, share the training: ddp; or fsdp, "
            "where each holds a part of weights, gradients and moments."
        ),
    ] = "ddp",
    teacher_ranks: Annotated[
        int,
        typer.Option(
            help="So many of torchrun's processes run the target for the others and nothing else: "
            "there is no feature store."
        ),
    ] = 0,
    weights: options.Weights = None,
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train a drafter: responses, features, training, bundle. Stops and resumes anywhere."""
    from dspark.recipes.make_bundle import BundleRun, make_bundle
    from dspark.recipes.progress import Progress
    from dspark.recipes.regenerate import RegenerateConfig
    from dspark.recipes.train import DraftShape, TrainConfig, TrainJob, training_of
    from dspark.recipes.values import parallel_value, weights_value

    shape = DraftShape(
        drafter=drafter,
        layers=layers,
        block_size=block_size,
        taps=taps,
        markov_rank=markov_rank,
        draft_vocabulary=draft_vocabulary,
    )
    config = TrainConfig(
        steps=steps,
        learning_rate=learning_rate,
        max_seconds=max_seconds,
        seed=seed,
        start="bundle" if warm_start else "noise" if from_noise else "target",
        **training_of(drafter, objective),
    )
    result = make_bundle(
        BundleRun(
            prompts=prompts,
            output=output,
            run=run,
            command=shlex.join(["dspark", *sys.argv[1:]]),
            target=target,
            weights=weights_value(weights),
            threads=threads,
            skip_bad=skip_bad,
            generate=generate,
            responses=RegenerateConfig(max_new_tokens=max_new_tokens),
            job=TrainJob(shape=shape, train=config, warm_start=warm_start),
            teacher_ranks=teacher_ranks,
            parallel=parallel_value(parallel),
        ),
        Progress(),
    )
    if result is None:  # another rank than the first
        return
    state = "done" if result.finished else "stopped; run the same command again to resume"
    print_note(
        f"{state}: {result.steps} steps, {result.positions:,} positions in {result.seconds:.0f} s; "
        f"accepted length {result.validation['accepted_length']:.3f} on held-out responses; "
        f"bundle in {output}"
    )
    if json:
        Screen().json(
            {
                "steps": result.steps,
                "positions": result.positions,
                "seconds": result.seconds,
                "validation": {
                    key: result.validation[key]
                    for key in ("accepted_length", "conditional_acceptance")
                },
                "bundle": str(output),
            }
        )
