"""The last rounds of a condition, while serving."""

import numpy as np

from dspark.calibration.samples import Rounds
from dspark.core.records import RoundRecord


class Window:
    """The last `size` rounds that were added."""

    def __init__(self, size: int, block_size: int) -> None:
        self.seen = 0
        self._logits = np.zeros((size, block_size), dtype=np.float32)
        self._entropies = np.zeros((size, block_size), dtype=np.float32)
        self._accepted = np.zeros(size, dtype=np.int64)
        self._judged = np.zeros(size, dtype=np.int64)

    @property
    def full(self) -> bool:
        return self.seen >= len(self._accepted)

    def add(self, record: RoundRecord) -> None:
        row = self.seen % len(self._accepted)
        self._logits[row], self._entropies[row] = record.confidence, record.entropy
        self._accepted[row], self._judged[row] = record.accepted, record.judged
        self.seen += 1

    def rounds(self) -> Rounds:
        count = min(self.seen, len(self._accepted))
        return Rounds(
            self._logits[:count].astype(np.float64),
            self._entropies[:count].astype(np.float64),
            self._accepted[:count].copy(),
            self._judged[:count].copy(),
            np.arange(count),
        )
