"""Sums of metrics, and the file that a run's metrics go to."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.training.objective import Ratio

Metrics = dict[str, Any]
"""Name -> number, or one number a slot."""


def add(totals: dict[str, Ratio], metrics: dict[str, Ratio]) -> None:
    for name, ratio in metrics.items():
        totals[name] = totals[name] + ratio if name in totals else ratio


def nothing(metrics: dict[str, Ratio]) -> dict[str, Ratio]:
    """The same names, counting nothing."""
    return {
        name: Ratio(torch.zeros_like(ratio.numerator), torch.zeros_like(ratio.denominator))
        for name, ratio in metrics.items()
    }


def numbers(totals: dict[str, Ratio]) -> Metrics:
    values = {name: ratio.value.double() for name, ratio in totals.items()}
    return {name: np.round(value.cpu().numpy(), 5).tolist() for name, value in values.items()}


class MetricsFile:
    """jsonl, a line now and then; every line has its `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, metrics: Metrics) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def trim(self, step: int) -> None:
        """Drops a torn last line, and the lines of steps taken after `step`."""
        if self.path.exists():
            lines = self.path.read_text().split("\n")[:-1]
            kept = "".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step)
            self.path.write_text(kept)
