"""`dspark calibrate`: a scaling of confidences from full-length rounds, and what it is worth."""

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.calibration.condition import Condition
from dspark.calibration.confidence import Scaling
from dspark.calibration.curves import ReliabilityCurve, reliability_curve
from dspark.calibration.export import export
from dspark.calibration.report import PositionReport, report
from dspark.calibration.samples import Rounds
from dspark.calibration.scaling import (
    FEW_ROUNDS,
    GRID,
    check_enough,
    fit_scaling,
    fit_temperatures,
    survival,
)
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
from dspark.core.exports import FORMATS
from dspark.core.records import RoundRecord
from dspark.core.sampling import SamplingParams
from dspark.data.prompts import Prompt
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.evaluation.reliability_plot import check_plots, plot_reliability
from dspark.recipes.calibration import candidate_set, read_calibration
from dspark.recipes.llm import LLM
from dspark.recipes.one_process import one_process
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job, make_jobs
from dspark.recipes.round_file import RoundFile, RoundRow, TextKey
from dspark.scheduling.policies import FixedLength


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationResult:
    condition: Condition
    entry: Entry
    positions: tuple[PositionReport, ...]
    curves: tuple[tuple[ReliabilityCurve, ReliabilityCurve], ...]
    """Per position: before and after, of the held-out rounds."""
    remarks: tuple[str, ...]
    """What to know before relying on it."""
    path: Path
    """The `calibration.json` that now holds it."""

    @property
    def mean_ece_before(self) -> float:
        return float(np.mean([position.ece_before for position in self.positions]))

    @property
    def mean_ece_after(self) -> float:
        return float(np.mean([position.ece_after for position in self.positions]))

    @property
    def mean_ece_temperature_alone(self) -> float:
        return float(np.mean([position.ece_temperature_alone for position in self.positions]))

    @property
    def mean_ece_floor(self) -> float:
        return float(np.mean([position.ece_floor for position in self.positions]))

    def to_json(self) -> dict[str, Any]:
        return {
            "positions": [position.to_json() for position in self.positions],
            "mean_ece_before": self.mean_ece_before,
            "mean_ece_after": self.mean_ece_after,
            "mean_ece_temperature_alone": self.mean_ece_temperature_alone,
            "mean_ece_floor": self.mean_ece_floor,
            "temperatures": [*self.entry.temperatures],
            "offsets": [*self.entry.offsets],
            "temperatures_alone": [*self.entry.temperatures_alone],
            "condition": self.condition.to_json(),
            "rounds_fitted": self.entry.rounds_fitted,
            "rounds_held_out": self.entry.rounds_held_out,
            "prompts_fitted": self.entry.prompts_fitted,
            "prompts_held_out": self.entry.prompts_held_out,
            "remarks": [*self.remarks],
            "calibration": str(self.path),
        }


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
        "condition": condition.to_json(), "max_new_tokens": sampling.max_new_tokens, "seed": seed,
    }  # fmt: skip
    with one_process(run) if run is not None else nullcontext():
        file = None if run is None else RoundFile(run / "rounds.jsonl", settings)
        texts = collect(llm, jobs, bundle.config.block_size, file, progress)

    fitted, held_out = split_halves(texts, bundle.config.block_size)
    check_enough(fitted)
    scaling, temperatures_alone = fit_scaling(fitted), fit_temperatures(fitted)
    positions = report(held_out, scaling, temperatures_alone, seed=seed)
    entry = Entry(
        temperatures=tuple(scaling.temperatures.tolist()),
        offsets=tuple(scaling.offsets.tolist()),
        temperatures_alone=tuple(temperatures_alone.tolist()),
        mean_survival=tuple(share or 0.0 for share in fitted.mean_survival),
        positions=tuple(position.to_json() for position in positions),
        rounds_fitted=len(fitted),
        rounds_held_out=len(held_out),
        prompts_fitted=len(np.unique(fitted.prompts_N)),
        prompts_held_out=len(np.unique(held_out.prompts_N)),
        command=command,
        data_sha256=_sha256(settings, texts),
    )
    path = bundle.path / FILE
    write_table(_table(bundle, weights_sha256, progress.say).with_entry(condition, entry), path)
    return CalibrationResult(
        condition=condition,
        entry=entry,
        positions=positions,
        curves=_curves(held_out, scaling),
        remarks=_remarks(positions),
        path=path,
    )


def check_files(form: str | None, output: Path | None, plot: Path | None) -> None:
    """Raises, before the long work, for what could not be written after it."""
    if form is not None and form not in FORMATS:
        near = difflib.get_close_matches(form, FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"format is {form!r}; it must be {' or '.join(FORMATS)}{hint}")
    if output is not None and form is None:
        raise ConfigError(
            "--output is where --format writes; give --format, or leave it out: calibration.json "
            "goes into the bundle"
        )
    for file in (output, plot):
        if file is not None and not writable(file):
            raise ConfigError(f"cannot write {file}: there is no such folder, or it is read-only")
    if plot is not None:
        check_plots()


def export_file(result: CalibrationResult, form: str, output: Path | None) -> Path:
    """Writes the temperatures in another engine's shape, by default into the bundle."""
    path = output or result.path.with_name(f"calibration.{form}.json")
    document = export(result.entry, form, dataset=result.entry.data_sha256)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def draw(result: CalibrationResult, path: Path) -> None:
    """The reliability diagram of the held-out rounds."""
    panels = [
        (_title(position), *curves)
        for position, curves in zip(result.positions, result.curves, strict=True)
    ]
    plot_reliability(panels, path)


def _title(p: PositionReport) -> str:
    auc = "" if p.auc is None else f", AUC {p.auc:.2f}"
    return f"position {p.position}\nECE {p.ece_before:.1%} → {p.ece_after:.1%}{auc}"


def collect(
    llm: LLM,
    jobs: Sequence[Job],
    block_size: int,
    file: RoundFile | None,
    progress: Progress,
) -> dict[TextKey, tuple[RoundRow, ...]]:
    """Every text's rounds with the whole block verified; texts that `file` has are not written
    again, and finished ones go there at once."""
    kept = {} if file is None else file.texts
    keys = [(job.domain, job.line, job.sample) for job in jobs]
    texts = {key: kept[key] for key in keys if key in kept}
    missing = [(key, job) for key, job in zip(keys, jobs, strict=True) if key not in texts]
    if texts:
        progress.say(f"{len(texts)} of {len(jobs)} texts were there already")
    if not missing:
        return texts
    config = EngineConfig.for_requests(
        (len(job.prompt) + job.params.max_new_tokens for _, job in missing),
        max_requests=llm.max_requests,
        row_exact=False,  # many texts are measured: which batch rounded which row is no bias
    )
    engine = Engine(llm.loaded.target, llm.drafter, FixedLength(block_size), config)
    for _, job in missing:
        engine.add(job.prompt, job.params)
    open_texts: dict[int, list[RoundRecord]] = {index: [] for index in range(len(missing))}
    with progress.task("texts", total=len(missing)) as advance:
        while not engine.idle:
            events = engine.step()
            for step in engine.records:
                for record in step.rounds:
                    open_texts[record.request].append(record)
            engine.records.clear()  # a long run would keep millions
            for event in events:
                if event.finished is not None:
                    key, rounds = missing[event.request][0], open_texts.pop(event.request)
                    texts[key] = tuple(
                        (r.accepted, r.judged, r.confidence) for r in rounds if r.confidence
                    )
                    if file is not None:
                        file.append(key, texts[key])
                    advance(1, key[0])
    return texts


def split_halves(
    texts: Mapping[TextKey, tuple[RoundRow, ...]], block_size: int
) -> tuple[Rounds, Rounds]:
    """Rounds to fit on and rounds to report on: every other prompt, with all its samples."""
    everything = rounds_of(texts, block_size)
    odd = everything.prompts_N % 2 == 1
    return everything.select(~odd), everything.select(odd)


def rounds_of(texts: Mapping[TextKey, tuple[RoundRow, ...]], block_size: int) -> Rounds:
    """All rounds of these texts; prompts are numbered by file and line."""
    prompts = sorted({(file, line) for file, line, _ in texts})
    number = {prompt: index for index, prompt in enumerate(prompts)}
    rows = [(number[key[:2]], row) for key in sorted(texts) for row in texts[key]]
    return Rounds(
        np.array([r[2] for _, r in rows], dtype=np.float32).reshape(-1, block_size).astype(float),
        np.array([r[0] for _, r in rows], dtype=np.int64),
        np.array([r[1] for _, r in rows], dtype=np.int64),
        np.array([prompt for prompt, _ in rows], dtype=np.int64),
    )


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


def _curves(
    rounds: Rounds, scaling: Scaling
) -> tuple[tuple[ReliabilityCurve, ReliabilityCurve], ...]:
    predictions = [survival(rounds), survival(rounds, scaling)]
    pairs = []
    for column in range(rounds.block_size):
        counted, labels = rounds.counted(column), rounds.labels(column)
        before, after = (
            reliability_curve(values_NK[counted, column], labels[counted])
            for values_NK in predictions
        )
        pairs.append((before, after))
    return tuple(pairs)


def _remarks(positions: Sequence[PositionReport]) -> tuple[str, ...]:
    remarks = []
    least = min(positions, key=lambda position: position.samples)
    if least.samples < FEW_ROUNDS:
        remarks.append(
            f"position {least.position} has {least.samples} held-out rounds, few: a perfect "
            f"predictor would show an ECE of {least.ece_floor:.1%} there; more prompts, --samples "
            "or --max-new-tokens narrow it"
        )
    ends = [GRID[0], GRID[-1]]
    for name in ("temperature", "temperature_alone"):
        edges = [p.position for p in positions if np.isclose(getattr(p, name), ends).any()]
        if edges:
            remarks.append(
                f"{name} of positions {edges} is at the edge of what is tried, {GRID[0]:g} to "
                f"{GRID[-1]:g}: the head says little there, or the sample is small"
            )
    constant = [p.position for p in positions if p.auc is None]
    if constant:
        remarks.append(f"positions {constant} were all accepted or all rejected: no AUC there")
    return tuple(remarks)


def _sha256(settings: dict[str, Any], texts: dict[TextKey, tuple[RoundRow, ...]]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for key in sorted(texts):
        rows = [[a, j, np.asarray(x, dtype=np.float32).tolist()] for a, j, x in texts[key]]
        digest.update(json.dumps([*key, rows]).encode())
    return digest.hexdigest()
