"""How true predicted acceptances came out, from one served round to the next."""

from typing import Any

from dspark.core.bins import BINS

_MEMORY = 20_000
"""Predictions after which the old ones count half: what is shown follows what is served."""


class Reliability:
    """Predictions in bins, each with how often it came true."""

    def __init__(self) -> None:
        self._counts = [0.0] * BINS
        self._predicted = [0.0] * BINS
        self._came_true = [0.0] * BINS
        self._total = 0.0

    def add(self, prediction: float, came_true: bool) -> None:
        if self._total >= _MEMORY:
            for values in (self._counts, self._predicted, self._came_true):
                values[:] = [value / 2 for value in values]
            self._total /= 2
        index = min(BINS - 1, int(prediction * BINS))
        self._counts[index] += 1
        self._predicted[index] += prediction
        self._came_true[index] += came_true
        self._total += 1

    def error(self) -> float | None:
        """Expected calibration error (Naeini et al., 2015); None without a prediction."""
        if not self._total:
            return None
        pairs = zip(self._predicted, self._came_true, strict=True)
        return sum(abs(predicted - true) for predicted, true in pairs) / self._total

    def rows(self) -> list[dict[str, Any]]:
        """JSON of the bins that hold something."""
        return [
            {"count": round(count), "confidence": predicted / count, "accepted": true / count}
            for count, predicted, true in zip(
                self._counts, self._predicted, self._came_true, strict=True
            )
            if count
        ]


def conditional(survival: tuple[float, ...], position: int) -> float:
    """Calibrated probability that `position` (from 0) is accepted if all before it are."""
    before = survival[position - 1] if position else 1.0
    return min(1.0, survival[position] / before) if before > 0 else 0.0
