"""`dspark data`: prompts that the target writes, its answers to prompts, and a look at both."""

from pathlib import Path
from typing import Annotated

import typer

from dspark.cli import options
from dspark.cli.output import Screen, print_note
from dspark.core.errors import DataError

_TARGET_ANSWERS = "Answer each prompt at this temperature. Repeatable. Default: 1 and 0."


def synthesize(
    output: Annotated[Path, typer.Option(help="File of prompts to write, jsonl.")],
    target: options.Target = None,
    count: Annotated[int, typer.Option(help="Prompts in the file at the end.")] = 1000,
    temperature: Annotated[float, typer.Option(help="Higher is more variety, and more noise.")] = 1,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longer user turns are dropped, for they have no end.")
    ] = 128,
    max_requests: options.TextsAtOnce = 64,
    seed: options.BaseSeed = 0,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Let the target write its own user turns. Stops and resumes anywhere."""
    from dspark.recipes.data_commands import run_synthesize
    from dspark.recipes.progress import Progress
    from dspark.recipes.synthesize import SynthesizeConfig
    from dspark.recipes.values import weights_value

    config = SynthesizeConfig(
        count=count,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_requests=max_requests,
        seed=seed,
    )
    prompts = run_synthesize(
        target, output, config, Progress(), weights=weights_value(weights), device=device,
        threads=threads,
    )  # fmt: skip
    print_note(f"{prompts} prompts in {output}")
    if json:
        Screen().json({"prompts": prompts, "output": str(output)})


def regenerate(
    prompts: options.TrainingPrompts = None,
    output: Annotated[
        Path, typer.Option(help="File of responses; dspark train has it in its run folder.")
    ] = Path("responses.jsonl"),
    target: options.Target = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask a server that serves the target, by OpenAI's API, as in "
            "http://127.0.0.1:8000/v1. Its key: DSPARK_API_KEY or OPENAI_API_KEY. Default: this "
            "process generates.",
            show_default=False,
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None,
        typer.Option(help="The model's name there. Default: its only one.", show_default=False),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once, of an endpoint.")] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds an endpoint may stay silent.")] = 120,
    tries: Annotated[int, typer.Option(help="Tries of a request, waiting longer each time.")] = 5,
    temperature: Annotated[
        list[float] | None, typer.Option(help=_TARGET_ANSWERS, show_default=False)
    ] = None,
    turns: options.Turns = None,
    thinking: options.Thinking = None,
    max_new_tokens: options.MaxNewTokens = 256,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 768,
    max_requests: options.TextsAtOnce = 64,
    seed: options.BaseSeed = 0,
    skip_bad: options.SkipBad = False,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Let the target answer prompts, every turn in order. Stops and resumes anywhere."""
    from dspark.recipes.data_commands import run_regenerate
    from dspark.recipes.progress import Progress
    from dspark.recipes.regenerate import RegenerateConfig
    from dspark.recipes.values import endpoint_value, weights_value

    config = RegenerateConfig(
        temperatures=tuple(temperature) if temperature else RegenerateConfig().temperatures,
        turns=turns,
        thinking=thinking,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_requests=max_requests,
        seed=seed,
    )
    server = endpoint_value(
        endpoint, model=endpoint_model, concurrency=concurrency, timeout=timeout, tries=tries
    )
    counts = run_regenerate(
        target, prompts or [], output, config, Progress(), endpoint=server, skip_bad=skip_bad,
        weights=weights_value(weights), device=device, threads=threads,
    )  # fmt: skip
    print_note(f"{counts['responses']} responses, {counts['tokens']:,} tokens in {output}")
    if json:
        Screen().json({**counts, "output": str(output)})


def inspect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Prompt files or folders of them, or a file of responses."
        ),
    ],
    target: options.Target = None,
    samples: Annotated[int, typer.Option(help="Show so many texts with their loss mask.")] = 2,
    thinking: options.Thinking = None,
    seed: Annotated[int, typer.Option(help="Which texts are shown.")] = 0,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Look at prompts, conversations or responses: lengths, domains, duplicates, bad lines, and
    texts with what a drafter is trained on in colour."""
    from dspark.recipes.inspect import inspect_data
    from dspark.recipes.progress import Progress

    report = inspect_data(
        paths, target, samples=samples, thinking=thinking, seed=seed, progress=Progress()
    )
    screen = Screen()
    for sample in report.samples:
        screen.print(sample.title)
        for text, trained in sample.runs:
            screen.masked(text, trained=trained)
        screen.end_line()
        screen.print()
    for line in report.lines:
        screen.print(line)
    if json:
        screen.json(report.counts)
    if report.counts["bad_lines"] and not report.counts["texts"]:
        raise DataError("no line of these files can be used; the first bad one is named above")
