"""How well calibrated each position is, before and after, with intervals and the floor."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.calibration.confidence import Scaling
from dspark.calibration.metrics import Metrics, floor_of_ece, interval
from dspark.calibration.samples import Rounds
from dspark.calibration.scaling import check_enough, survival

RESAMPLES = 1000
Interval = tuple[float, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionReport:
    """Of the cumulative product up to one position; shares, not percent. Intervals are 95%, by
    resampling prompts; None where the sample has one prompt, or lacks acceptances or rejections."""

    position: int
    samples: int
    """Held-out rounds that verified this position."""
    accepted: float
    """Share of them that accepted the prefix."""
    temperature: float
    offset: float
    temperature_alone: float
    """Fitted alone, the paper's calibration."""
    ece_temperature_alone: float
    """Under it, and those before it."""
    ece_before: float
    ece_before_ci95: Interval
    ece_after: float
    ece_after_ci95: Interval
    ece_floor: float
    """Mean ECE of a perfect predictor that makes the calibrated predictions, at this many
    samples."""
    ece_floor_p95: float
    """Its 95th percentile."""
    auc: float | None
    auc_ci95: Interval
    brier: float
    brier_before: float
    brier_ci95: Interval
    bias: float
    """Mean prediction minus share accepted; positive is over-confident."""
    bias_before: float
    bias_ci95: Interval

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report(
    rounds: Rounds,
    scaling: Scaling,
    temperatures_alone: npt.ArrayLike,
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> tuple[PositionReport, ...]:
    """Per position, how held-out `rounds` are predicted without and with this scaling.

    Without a "before" in its name a number is of the calibrated predictions.
    Raises DataError for fewer than `scaling.LEAST_ROUNDS` at a position.
    """
    check_enough(rounds)
    before_NK, after_NK = survival(rounds), survival(rounds, scaling)
    paper = Scaling.of_temperatures(temperatures_alone)
    alone_NK = survival(rounds, paper)
    generator = np.random.default_rng(seed)
    reports = []
    for column in range(rounds.block_size):
        counted = rounds.counted(column)
        labels, prompts = rounds.labels(column)[counted], rounds.prompts_N[counted]
        before = Metrics(before_NK[counted, column], labels, prompts)
        after = Metrics(after_NK[counted, column], labels, prompts)
        alone = Metrics(alone_NK[counted, column], labels, prompts)
        floor = floor_of_ece(after_NK[counted, column], generator)
        weights = after.resampled(generator, resamples) if after.prompts > 1 else None

        def spread(metric: Any, weights: Any = weights) -> Interval:
            return None if weights is None else interval(metric(weights))

        auc = float(after.auc(after.once)[0])
        reports.append(
            PositionReport(
                position=column + 1,
                samples=int(counted.sum()),
                accepted=float(labels.mean()),
                temperature=float(scaling.temperatures[column]),
                offset=float(scaling.offsets[column]),
                temperature_alone=float(paper.temperatures[column]),
                ece_temperature_alone=float(alone.ece(alone.once)[0]),
                ece_before=float(before.ece(before.once)[0]),
                ece_before_ci95=spread(before.ece),
                ece_after=float(after.ece(after.once)[0]),
                ece_after_ci95=spread(after.ece),
                ece_floor=float(floor.mean()),
                ece_floor_p95=float(np.quantile(floor, 0.95)),
                auc=None if np.isnan(auc) else auc,
                auc_ci95=spread(after.auc),
                brier=float(after.brier(after.once)[0]),
                brier_before=float(before.brier(before.once)[0]),
                brier_ci95=spread(after.brier),
                bias=float(after.bias(after.once)[0]),
                bias_before=float(before.bias(before.once)[0]),
                bias_ci95=spread(after.bias),
            )
        )
    return tuple(reports)
