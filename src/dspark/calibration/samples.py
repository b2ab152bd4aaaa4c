"""Rounds as calibration sees them: what the drafter said of its block, and how far the target
accepted it.

A position counts where it was verified. Its label is whether the whole prefix up to it was
accepted, so it is zero after a rejection; positions behind an end of text were never judged and do
not count (DeepSpec's convention).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark.calibration.arrays import BoolArray, FloatArray, IntArray
from dspark.core.records import RoundRecord


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """N rounds of full blocks' logits, with what verification found."""

    logits_NK: FloatArray
    """Raw confidence logits."""
    entropies_NK: FloatArray
    """In nats, of what each position was drawn from (`RoundRecord.entropy`)."""
    accepted_N: IntArray
    judged_N: IntArray
    """Positions whose verdict counts: accepted <= judged <= K."""
    prompts_N: IntArray
    """Which prompt a round belongs to: the unit of resampling and of splitting."""

    def __post_init__(self) -> None:
        assert (self.accepted_N <= self.judged_N).all()
        assert (self.judged_N <= self.block_size).all()

    def __len__(self) -> int:
        return len(self.accepted_N)

    @property
    def block_size(self) -> int:
        return int(self.logits_NK.shape[1])

    @classmethod
    def of(
        cls, records: Sequence[RoundRecord], prompts: Iterable[int], block_size: int
    ) -> "Rounds":
        """The rounds that had a draft with confidences; `prompts` has an entry a record."""
        kept = [(r, p) for r, p in zip(records, prompts, strict=True) if r.confidence]
        logits = np.array([r.confidence for r, _ in kept], dtype=np.float64)
        entropies = np.array([r.entropy for r, _ in kept], dtype=np.float64)
        return cls(
            logits.reshape(len(kept), block_size),
            entropies.reshape(len(kept), block_size),
            np.array([r.accepted for r, _ in kept], dtype=np.int64),
            np.array([r.judged for r, _ in kept], dtype=np.int64),
            np.array([p for _, p in kept], dtype=np.int64),
        )

    def select(self, chosen_N: BoolArray) -> "Rounds":
        return Rounds(
            self.logits_NK[chosen_N],
            self.entropies_NK[chosen_N],
            self.accepted_N[chosen_N],
            self.judged_N[chosen_N],
            self.prompts_N[chosen_N],
        )

    def first(self, positions: int) -> "Rounds":
        """The same rounds, as if their blocks were this long."""
        return Rounds(
            self.logits_NK[:, :positions],
            self.entropies_NK[:, :positions],
            np.minimum(self.accepted_N, positions),
            np.minimum(self.judged_N, positions),
            self.prompts_N,
        )

    def without_entropy(self) -> "Rounds":
        """The same rounds, as if nothing were known of the draft's distribution."""
        return replace(self, entropies_NK=np.zeros_like(self.entropies_NK))

    def counted(self, column: int) -> BoolArray:
        """Rounds [N] that say something about this position (a column, counted from 0)."""
        return self.judged_N > column

    def labels(self, column: int) -> BoolArray:
        """[N]: the prefix up to and including this position was accepted."""
        return self.accepted_N > column

    @property
    def samples(self) -> tuple[int, ...]:
        """Rounds that count, per position."""
        return tuple(int(self.counted(column).sum()) for column in range(self.block_size))

    @property
    def mean_survival(self) -> tuple[float | None, ...]:
        """Share of prefixes accepted, per position; None where nothing was judged."""
        return tuple(
            float(self.labels(column)[counted].mean()) if counted.any() else None
            for column, counted in ((k, self.counted(k)) for k in range(self.block_size))
        )
