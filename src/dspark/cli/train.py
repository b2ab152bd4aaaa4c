"""`dspark train`: a drafter for a target, from on-policy responses."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import options
from dspark.cli.command_line import recorded_command
from dspark.cli.output import Screen, print_note

if TYPE_CHECKING:
    from dspark.recipes.make_bundle import BundleResult


def train(
    prompts: options.TrainingPrompts = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the bundle to write. Default: TARGET-DRAFTER here.", show_default=False
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run: prompts, responses, features, resumable state. "
            "Default: OUTPUT-run.",
            show_default=False,
        ),
    ] = None,
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
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Only say what it would take: tokens, disk, memory, time."),
    ] = False,
    steps: Annotated[int, typer.Option(help="Training steps, of 256 blocks each.")] = 2000,
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
            help="Propose only, and train for, the so many tokens most frequent in the responses: "
            "a third of the vocabulary trains much faster. Default: any.",
            show_default=False,
        ),
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(
            help="Draft by sampling among the so many best tokens of a slot, which is cheap; 0 is "
            "among all it may propose."
        ),
    ] = 256,
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
    synthesize: Annotated[
        int, typer.Option(help="So many prompts are written by the target where none are given.")
    ] = 1000,
    skip_bad: options.SkipBad = False,
    given_answers: Annotated[
        bool,
        typer.Option(
            "--given-answers",
            help="Train on the answers in the conversations, not on the target's own.",
        ),
    ] = False,
    turns: options.Turns = None,
    thinking: options.Thinking = None,
    features: Annotated[
        str,
        typer.Option(
            help="How hidden states are stored: bf16; int8, in half the space; or none, and the "
            "target computes them in every step."
        ),
    ] = "bf16",
    evaluation_prompts: Annotated[
        int, typer.Option(help="Held-out prompts to decode at the end; 0 is none.")
    ] = 16,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Curves for TensorBoard in the run folder.")
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
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train a drafter: prompts, responses, features, training, bundle, evaluation. Says what it
    will take, stops and resumes anywhere."""
    from dspark.recipes.draft_shape import DraftShape
    from dspark.recipes.make_bundle import BundleRun, make_bundle
    from dspark.recipes.progress import Progress
    from dspark.recipes.regenerate import RegenerateConfig
    from dspark.recipes.synthesize import SynthesizeConfig
    from dspark.recipes.train import TrainConfig, TrainJob, training_of
    from dspark.recipes.values import features_value, parallel_value, weights_value

    shape = DraftShape(
        drafter=drafter,
        layers=layers,
        block_size=block_size,
        taps=taps,
        markov_rank=markov_rank,
        draft_vocabulary=draft_vocabulary,
        candidates=candidates,
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
            prompts=prompts or [],
            output=output,
            run=run,
            command=recorded_command(),
            target=target,
            weights=weights_value(weights),
            device=device,
            threads=threads,
            skip_bad=skip_bad,
            generate=generate,
            given_answers=given_answers,
            plan_only=plan,
            synthesis=SynthesizeConfig(count=synthesize),
            responses=RegenerateConfig(
                max_new_tokens=max_new_tokens, turns=turns, thinking=thinking
            ),
            evaluation_prompts=evaluation_prompts,
            job=TrainJob(
                shape=shape,
                train=config,
                warm_start=warm_start,
                features=features_value(features),
                tensorboard=tensorboard,
            ),
            teacher_ranks=teacher_ranks,
            parallel=parallel_value(parallel),
        ),
        Progress(),
    )
    if result is None:  # another rank than the first
        return
    _tell(result)
    if json:
        Screen().json(_document(result))


def _tell(result: "BundleResult") -> None:
    training, evaluation = result.training, result.evaluation
    if training is None:
        return
    state = "done" if training.finished else "stopped; run the same command again to resume"
    print_note(
        f"{state}: {training.steps} steps, {training.positions:,} positions in "
        f"{training.seconds:.0f} s; accepted length {training.validation['accepted_length']:.3f} "
        f"on held-out responses; bundle in {result.output}"
    )
    for name, domain in (evaluation.domains if evaluation else {}).items():
        print_note(
            f"decoding {domain.prompts} held-out prompts of {name}: accepted length "
            f"{domain.acceptance.accepted_length:.3f}"
        )


def _document(result: "BundleResult") -> dict[str, Any]:
    plan = {"plan": result.plan.to_json()} if result.plan else {}
    training, evaluation = result.training, result.evaluation
    if training is None:
        return plan
    return {
        "steps": training.steps,
        "positions": training.positions,
        "seconds": training.seconds,
        "validation": {
            key: training.validation[key] for key in ("accepted_length", "conditional_acceptance")
        },
        "evaluation": None if evaluation is None else evaluation.to_json(),
        "bundle": str(result.output),
        **plan,
    }
