"""What `dspark calibrate` found: for people, for scripts, for other engines, and as a diagram."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.calibration.condition import Condition
from dspark.calibration.confidence import Scaling
from dspark.calibration.curves import ReliabilityCurve, reliability_curve
from dspark.calibration.export import export
from dspark.calibration.report import PositionReport
from dspark.calibration.samples import Rounds
from dspark.calibration.scaling import (
    FEW_ROUNDS,
    GRID,
    MOST_ENTROPY_WEIGHT,
    MOST_OFFSET,
    survival,
)
from dspark.calibration.table import Entry
from dspark.evaluation.reliability_plot import plot_reliability

_BOUNDS = {
    "temperature": ("temperature", GRID[0], GRID[-1]),
    "offset": ("offset", -MOST_OFFSET, MOST_OFFSET),
    "entropy_weight": ("entropy weight", -MOST_ENTROPY_WEIGHT, MOST_ENTROPY_WEIGHT),
    "temperature_alone": ("temperature alone", GRID[0], GRID[-1]),
}
"""By the name in `PositionReport`: how people call it, and the bounds of its fit."""


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
    def mean_ece_without_entropy(self) -> float:
        return float(np.mean([position.ece_without_entropy for position in self.positions]))

    @property
    def mean_ece_floor(self) -> float:
        return float(np.mean([position.ece_floor for position in self.positions]))

    def to_json(self) -> dict[str, Any]:
        return {
            "positions": [position.to_json() for position in self.positions],
            "mean_ece_before": self.mean_ece_before,
            "mean_ece_after": self.mean_ece_after,
            "mean_ece_temperature_alone": self.mean_ece_temperature_alone,
            "mean_ece_without_entropy": self.mean_ece_without_entropy,
            "mean_ece_floor": self.mean_ece_floor,
            "temperatures": [*self.entry.temperatures],
            "offsets": [*self.entry.offsets],
            "entropy_weights": [*self.entry.entropy_weights],
            "temperatures_alone": [*self.entry.temperatures_alone],
            "condition": self.condition.to_json(),
            "rounds_fitted": self.entry.rounds_fitted,
            "rounds_held_out": self.entry.rounds_held_out,
            "prompts_fitted": self.entry.prompts_fitted,
            "prompts_held_out": self.entry.prompts_held_out,
            "remarks": [*self.remarks],
            "calibration": str(self.path),
        }


def curves_of(
    rounds: Rounds, scaling: Scaling
) -> tuple[tuple[ReliabilityCurve, ReliabilityCurve], ...]:
    """Per position: of the head as it is, and of this scaling."""
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


def remarks_on(positions: Sequence[PositionReport]) -> tuple[str, ...]:
    """What a reader of these numbers should be told."""
    remarks = []
    least = min(positions, key=lambda position: position.samples)
    if least.samples < FEW_ROUNDS:
        remarks.append(
            f"position {least.position} has {least.samples} held-out rounds, few: a perfect "
            f"predictor would show an ECE of {least.ece_floor:.1%} there; more prompts, --samples "
            "or --max-new-tokens narrow it"
        )
    for name, (what, low, high) in _BOUNDS.items():
        edges = [p.position for p in positions if np.isclose(getattr(p, name), [low, high]).any()]
        if edges:
            remarks.append(
                f"the {what} of positions {edges} is at the edge of what is tried, {low:g} to "
                f"{high:g}: the head says little there, or the sample is small"
            )
    constant = [p.position for p in positions if p.auc is None]
    if constant:
        remarks.append(f"positions {constant} were all accepted or all rejected: no AUC there")
    return tuple(remarks)


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
