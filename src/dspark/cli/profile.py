"""`dspark profile`: measure what steps cost on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.output import Screen
from dspark.cli.table import table

if TYPE_CHECKING:
    from dspark.recipes.profile import ProfileResult


def profile(
    max_requests: Annotated[
        int, typer.Option(help="Measure powers of two of requests up to this many.")
    ] = 32,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Cached tokens of each request; all shapes are measured at the first. "
            "Repeatable. Default: 128 and 512.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Visits of every shape that count; medians are kept.")
    ] = 5,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Also write the table for another engine: sglang or tensorrt-llm.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File for --format to write.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw SPS(B) into this file (png, svg or pdf).", show_default=False),
    ] = None,
    target: options.Target = None,
    draft: options.Draft = "auto",
    draft_length: options.DraftLength = None,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    cuda_graphs: options.CudaGraphs = None,
    threads: options.Threads = None,
    many_requests: options.ManyRequests = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure what steps cost here, for the policies that weigh it; takes minutes."""
    from dspark.core.errors import ConfigError
    from dspark.recipes.llm import LLM
    from dspark.recipes.profile import ProfileConfig, draw, export
    from dspark.recipes.profile import profile as run
    from dspark.recipes.progress import Progress
    from dspark.recipes.values import check_file, format_value

    config = ProfileConfig(
        max_requests=max_requests,
        contexts=tuple(context) if context else ProfileConfig().contexts,
        repeats=repeats,
    )
    chosen = format_value(form)
    if (chosen is None) != (output is None):
        raise ConfigError("--format and --output go together: which engine's shape, and which file")
    if output is not None:
        check_file(output)
    if plot is not None:
        check_file(plot, figure=True)
    progress = Progress()
    llm = LLM(
        target,
        draft=draft,
        draft_length=draft_length,
        policy="off",
        weights=weights,
        device=device,
        cuda_graphs=cuda_graphs,
        threads=threads,
        many_requests=many_requests,
        progress=progress,
    )
    result = run(llm, config, progress=progress)
    if chosen is not None and output is not None:
        export(result, chosen, output)
        progress.say(f"{chosen} table: {output}")
    if plot is not None:
        draw(result, plot)
        progress.say(f"plot: {plot}")
    screen = Screen()
    screen.print(report(result))
    if json:
        screen.json(result.to_json())


def report(result: "ProfileResult") -> str:
    """The result for people: whole blocks verified, and what capture costs when nobody drafts."""
    captured = {cell.requests: cell for cell in result.capture}
    rows = [
        [
            str(row.requests),
            str(row.batch_tokens),
            f"{1000 * captured[row.requests].plain:.1f}",
            f"{captured[row.requests].captured / captured[row.requests].plain - 1:+.1%}",
            f"{1000 * row.draft:.1f}",
            f"{1000 * row.step:.1f}",
            f"{1 / (row.step + row.draft):.1f}",
        ]
        for row in result.whole_blocks()
    ]
    header = [
        "requests", "tokens", "plain step, ms", "capture", "draft, ms", "step, ms", "steps/s",
    ]  # fmt: skip
    return "\n".join(
        [
            table(header, rows),
            "",
            f"The model is within {result.fit.worst_error:.1%} of every measured step.",
            f"Kept for {', '.join(f'{k} {v}' for k, v in result.table.fingerprint.items())}:",
            str(result.path),
        ]
    )
