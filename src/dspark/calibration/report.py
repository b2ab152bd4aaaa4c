"""How well each position is predicted: by the head as it is, by the paper's temperatures, by
temperature and offset, and by these with entropy; with intervals and the floor."""

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
    entropy_weight: float
    temperature_alone: float
    """Fitted alone, the paper's calibration."""
    ece_temperature_alone: float
    """Under it, and those before it."""
    auc_temperature_alone: float | None
    brier_temperature_alone: float
    ece_without_entropy: float
    """Under temperature and offset, fitted as if there were no entropy."""
    auc_without_entropy: float | None
    brier_without_entropy: float
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
    auc_before: float | None
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
    without_entropy: Scaling,
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> tuple[PositionReport, ...]:
    """Per position, how held-out `rounds` are predicted: raw ("before"), with the temperatures that
    were fitted alone, with the scaling that was fitted without entropy, and with `scaling`, which
    numbers of no such name are of.

    Raises DataError for fewer than `scaling.LEAST_ROUNDS` at a position.
    """
    check_enough(rounds)
    before_NK, after_NK = survival(rounds), survival(rounds, scaling)
    paper = Scaling.of_temperatures(temperatures_alone)
    alone_NK, without_NK = survival(rounds, paper), survival(rounds, without_entropy)
    generator = np.random.default_rng(seed)
    reports = []
    for column in range(rounds.block_size):
        counted = rounds.counted(column)
        labels, prompts = rounds.labels(column)[counted], rounds.prompts_N[counted]
        before = Metrics(before_NK[counted, column], labels, prompts)
        after = Metrics(after_NK[counted, column], labels, prompts)
        alone = Metrics(alone_NK[counted, column], labels, prompts)
        without = Metrics(without_NK[counted, column], labels, prompts)
        floor = floor_of_ece(after_NK[counted, column], generator)
        weights = after.resampled(generator, resamples) if after.prompts > 1 else None

        def spread(metric: Any, weights: Any = weights) -> Interval:
            return None if weights is None else interval(metric(weights))

        reports.append(
            PositionReport(
                position=column + 1,
                samples=int(counted.sum()),
                accepted=float(labels.mean()),
                temperature=float(scaling.temperatures[column]),
                offset=float(scaling.offsets[column]),
                entropy_weight=float(scaling.entropy_weights[column]),
                temperature_alone=float(paper.temperatures[column]),
                ece_temperature_alone=float(alone.ece(alone.once)[0]),
                auc_temperature_alone=_auc(alone),
                brier_temperature_alone=float(alone.brier(alone.once)[0]),
                ece_without_entropy=float(without.ece(without.once)[0]),
                auc_without_entropy=_auc(without),
                brier_without_entropy=float(without.brier(without.once)[0]),
                ece_before=float(before.ece(before.once)[0]),
                ece_before_ci95=spread(before.ece),
                ece_after=float(after.ece(after.once)[0]),
                ece_after_ci95=spread(after.ece),
                ece_floor=float(floor.mean()),
                ece_floor_p95=float(np.quantile(floor, 0.95)),
                auc=_auc(after),
                auc_before=_auc(before),
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


def _auc(metrics: Metrics) -> float | None:
    value = float(metrics.auc(metrics.once)[0])
    return None if np.isnan(value) else value
