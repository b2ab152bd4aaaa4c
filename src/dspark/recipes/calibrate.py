"""`dspark calibrate`: a scaling of confidences from full-length rounds, and what it is worth."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from dspark.calibration.condition import Condition
from dspark.calibration.report import report
from dspark.calibration.scaling import check_enough, fit_scaling, fit_temperatures
from dspark.calibration.table import (
    FILE,
    CalibrationTable,
    Entry,
    file_sha256,
    writable,
    write_table,
)
from dspark.checkpoints.bundle import Bundle
from dspark.checkpoints.native import WEIGHTS, read_bundle
from dspark.core.errors import CheckpointError, ConfigError, DataError
from dspark.core.sampling import SamplingParams
from dspark.data.prompts import Prompt
from dspark.recipes.calibrate_result import CalibrationResult, curves_of, remarks_on
from dspark.recipes.calibrate_rounds import collect, data_sha256, split_halves
from dspark.recipes.calibration import candidate_set, read_calibration
from dspark.recipes.llm import LLM
from dspark.recipes.one_process import one_process
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import make_jobs
from dspark.recipes.round_file import RoundFile
from dspark.recipes.values import check_file, format_value


def calibratable(folder: Path | None) -> Bundle:
    """The bundle, if it can be calibrated: ConfigError or CheckpointError before the long work."""
    if folder is None:
        raise ConfigError("there is no drafter to calibrate; give a bundle with --draft")
    bundle = read_bundle(folder)
    if not bundle.config.has_confidence:
        raise CheckpointError(
            f"draft bundle {bundle.path} has no confidence head, so there is nothing to calibrate; "
            "policies off and fixed:N work without one"
        )
    if not writable(bundle.path / FILE):
        raise CheckpointError(
            f"cannot write {FILE} into {bundle.path}; calibrate a copy of the bundle"
        )
    return bundle


def calibrate(
    llm: LLM,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    command: str,
    samples: int = 1,
    seed: int = 0,
    run: Path | None = None,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Fits a scaling for the condition of `sampling` on every other prompt, reports on the rest,
    and writes both into the bundle, beside its other conditions.

    Rounds verify whole blocks, as fits need; `llm.max_requests` texts are written at once.
    command: for the record, how this was asked for.
    run: a folder that keeps the rounds, so that an interrupted run goes on where it was.

    Raises ConfigError or CheckpointError for a drafter that cannot be calibrated, DataError for
    fewer rounds than a fit needs.
    """
    progress = progress or Progress(quiet=True)
    bundle = calibratable(llm.bundle_folder)
    jobs = make_jobs(llm, prompts, sampling, samples=samples, seed=seed, say=progress.say)
    if len({(job.domain, job.line) for job in jobs}) < 2:
        raise DataError("one prompt cannot be split in halves, to fit and to report; give more")
    condition = Condition.of(jobs[0].params, candidate_set(bundle))
    weights_sha256 = file_sha256(bundle.path / WEIGHTS)
    settings = {
        "target": llm.loaded.name, "weights": llm.loaded.weights, "drafter": weights_sha256,
        "block_size": bundle.config.block_size, "condition": condition.to_json(),
        "max_new_tokens": sampling.max_new_tokens, "seed": seed,
    }  # fmt: skip
    with one_process(run) if run is not None else nullcontext():
        file = None if run is None else RoundFile(run / "rounds.jsonl", settings)
        texts = collect(llm, jobs, bundle.config.block_size, file, progress)

    fitted, held_out = split_halves(texts, bundle.config.block_size)
    check_enough(fitted)
    scaling, temperatures_alone = fit_scaling(fitted), fit_temperatures(fitted)
    without = fit_scaling(fitted.without_entropy())
    positions = report(held_out, scaling, temperatures_alone, without, seed=seed)
    entry = Entry(
        temperatures=tuple(scaling.temperatures.tolist()),
        offsets=tuple(scaling.offsets.tolist()),
        entropy_weights=tuple(scaling.entropy_weights.tolist()),
        temperatures_alone=tuple(temperatures_alone.tolist()),
        mean_survival=tuple(share or 0.0 for share in fitted.mean_survival),
        positions=tuple(position.to_json() for position in positions),
        rounds_fitted=len(fitted),
        rounds_held_out=len(held_out),
        prompts_fitted=len(np.unique(fitted.prompts_N)),
        prompts_held_out=len(np.unique(held_out.prompts_N)),
        command=command,
        data_sha256=data_sha256(settings, texts),
    )
    path = bundle.path / FILE
    write_table(_table(bundle, weights_sha256, progress.say).with_entry(condition, entry), path)
    return CalibrationResult(
        condition=condition,
        entry=entry,
        positions=positions,
        curves=curves_of(held_out, scaling),
        remarks=remarks_on(positions),
        path=path,
    )


def check_files(form: str | None, output: Path | None, plot: Path | None) -> None:
    """Raises, before the long work, for what could not be written after it."""
    format_value(form)
    if output is not None and form is None:
        raise ConfigError(
            "--output is where --format writes; give --format, or leave it out: calibration.json "
            "goes into the bundle"
        )
    if output is not None:
        check_file(output)
    if plot is not None:
        check_file(plot, figure=True)


def _table(bundle: Bundle, weights_sha256: str, say: Callable[[str], None]) -> CalibrationTable:
    """The bundle's table to add to; a new one where there is none that fits."""
    try:
        table = read_calibration(bundle)
    except CheckpointError as error:
        say(f"replaced: {error}")
        table = None
    if table is not None:
        return table
    return CalibrationTable(block_size=bundle.config.block_size, weights_sha256=weights_sha256)
