"""`dspark calibrate`: make a drafter's confidences probabilities, and say how good they are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.cli.command_line import recorded_command
from dspark.cli.output import Screen, print_note
from dspark.cli.sampling import sampling_params
from dspark.cli.table import number, table

if TYPE_CHECKING:
    from dspark.recipes.calibrate_result import CalibrationResult


def calibrate(
    prompts: options.Prompts = None,
    split: options.Split = None,
    limit: options.Limit = None,
    samples: options.Samples = 1,
    target: options.Target = None,
    draft: Annotated[
        str,
        typer.Option(
            help="Draft bundle to calibrate: a folder, into which calibration.json is written. "
            "Default: the shipped one for the embedded target.",
            show_default=False,
        ),
    ] = "auto",
    verification: Annotated[
        str, typer.Option(help="Verification rule: rejection or coupled.")
    ] = "rejection",
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    max_new_tokens: options.MaxNewTokens = 256,
    seed: options.BaseSeed = 0,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the rounds there: the same command goes on where it was interrupted.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Also write the temperatures alone for sglang or tensorrt-llm.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where --format writes. Default: calibration.FORMAT.json in the bundle.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the reliability diagram (png, svg or pdf).",
            show_default=False,
        ),
    ] = None,
    max_requests: options.TextsAtOnce = 32,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Calibrate the bundle's confidences on half of the prompts, report on the other half."""
    from dspark.recipes.bundles import bundle_folder
    from dspark.recipes.calibrate import calibratable, check_files
    from dspark.recipes.calibrate import calibrate as run_calibration
    from dspark.recipes.calibrate_result import draw, export_file
    from dspark.recipes.llm import LLM
    from dspark.recipes.progress import Progress
    from dspark.recipes.prompt_sets import gather_prompts

    sampling = sampling_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        verification=verification,
    )
    check_files(form, output, plot)
    calibratable(bundle_folder(draft, target))
    progress = Progress()
    chosen = gather_prompts(prompts, split=split, limit=limit, say=progress.say)
    llm = LLM(
        target,
        draft=draft,
        weights=weights,
        device=device,
        threads=threads,
        max_requests=max_requests,
        calibrated=False,
        progress=progress,
    )
    result = run_calibration(
        llm,
        chosen,
        sampling,
        command=recorded_command(),
        samples=samples,
        seed=seed,
        run=run,
        progress=progress,
    )
    screen = Screen()
    screen.print(report(result))
    if form is not None:
        print_note(f"{form}: {export_file(result, form, output)}")
    if plot is not None:
        draw(result, plot)
        print_note(f"reliability diagram: {plot}")
    if json:
        screen.json(result.to_json())


def report(result: "CalibrationResult") -> str:
    """The result for people."""
    header = ["position", "rounds", "accepted", "temperature", "offset", "entropy weight",
              "ECE", "95% interval", "floor", "bias"]  # fmt: skip
    rows = [
        [
            str(p.position),
            str(p.samples),
            f"{p.accepted:.1%}",
            f"{p.temperature:.2f}",
            f"{p.offset:+.2f}",
            f"{p.entropy_weight:+.2f}",
            f"{p.ece_after:.1%}",
            "-" if p.ece_after_ci95 is None else "{:.1%} to {:.1%}".format(*p.ece_after_ci95),
            f"{p.ece_floor:.1%}",
            f"{p.bias:+.1%}",
        ]
        for p in result.positions
    ]
    entry = result.entry
    return "\n".join([
        f"condition: {result.condition}",
        f"calibrated on {entry.rounds_fitted} rounds of {entry.prompts_fitted} prompts; reported "
        f"on {entry.rounds_held_out} rounds of {entry.prompts_held_out} others:",
        "",
        table(header, rows),
        "",
        "what each part brings (raw: the head as it is; T: the paper's temperature alone; offset:",
        "beside a temperature; all: with the entropy of the draft's distribution):",
        "",
        table(*_parts(result)),
        "",
        f"mean ECE {result.mean_ece_before:.1%} raw, {result.mean_ece_temperature_alone:.1%} with "
        f"a temperature alone, {result.mean_ece_without_entropy:.1%} with an offset beside it, "
        f"{result.mean_ece_after:.1%} with entropy as well; a perfect predictor would show "
        f"{result.mean_ece_floor:.1%} on as many rounds.",
        *(f"note: {remark}" for remark in result.remarks),
        f"written to {result.path}",
    ])  # fmt: skip


def _parts(result: "CalibrationResult") -> tuple[list[str], list[list[str]]]:
    """ECE, AUC and Brier score of every position, with more and more of the calibration."""
    parts = ["raw", "T", "offset", "all"]
    header = ["position", *(f"{name} {part}" for name in ("ECE", "AUC", "Brier") for part in parts)]
    rows = []
    for p in result.positions:
        eces = p.ece_before, p.ece_temperature_alone, p.ece_without_entropy, p.ece_after
        aucs = p.auc_before, p.auc_temperature_alone, p.auc_without_entropy, p.auc
        briers = p.brier_before, p.brier_temperature_alone, p.brier_without_entropy, p.brier
        rows.append(
            [
                str(p.position),
                *(f"{value:.1%}" for value in eces),
                *(number(value, ".3f") for value in aucs),
                *(f"{value:.3f}" for value in briers),
            ]
        )
    return header, rows
