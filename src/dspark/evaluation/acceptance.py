"""How much of the drafts the target accepted, from round records (DESIGN section 6, definitions).

An end of text inside the accepted run cuts the round there: later slots were never judged, so they
count as neither accepted nor offered, and no bonus token is counted. This is what DeepSpec's
evaluator does, so its tables and the paper's compare with these numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.core.records import RoundRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Ratios over all rounds together, not means of ratios; None where nothing was counted."""

    rounds: int
    accepted_length: float | None
    """Tokens a round emits: sum(accepted + 1) / rounds. 1 is plain decoding."""
    acceptance_rate: float | None
    """accepted / offered draft tokens."""
    figure5_rate: float | None
    """sum(accepted + 1) / sum(offered + 1): the paper's figure 5, DeepSpec's `verify_rate`."""
    verification_budget: float | None
    """Mean of 1 + admitted: rows of the target's forward that a request takes in a round."""
    conditional: tuple[float | None, ...]
    """Per position: accepted, among rounds that judged it and accepted all before it (figure 2)."""
    survival: tuple[float | None, ...]
    """Per position: accepted up to it, of rounds that judged it (DeepSpec's `accept_rate@k`)."""


def position_counts(records: Sequence[RoundRecord], position: int) -> tuple[int, int]:
    """(accepted, judged) of these rounds at a position (from 1), given that all before it were
    accepted: numerator and denominator of figure 2, which add up over rounds."""
    open_rounds = [r for r in records if r.judged >= position and r.accepted >= position - 1]
    return sum(r.accepted >= position for r in open_rounds), len(open_rounds)


def measure_acceptance(records: Sequence[RoundRecord]) -> Acceptance:
    """Every acceptance statistic of these rounds; positions go to the longest offer among them."""
    admitted, offered, accepted, emitted = (
        np.array(column, dtype=np.int64)
        for column in (
            [r.admitted for r in records],
            [r.judged for r in records],
            [r.accepted for r in records],
            [r.emitted for r in records],
        )
    )
    rounds = len(records)
    positions = range(1, int(offered.max(initial=0)) + 1)
    # A judged slot before the first rejection was accepted; the slot after them was judged too.
    reached = [int((accepted >= k).sum()) for k in positions]
    asked = [int(((offered >= k) & (accepted >= k - 1)).sum()) for k in positions]
    return Acceptance(
        rounds=rounds,
        accepted_length=_ratio(int(emitted.sum()), rounds),
        acceptance_rate=_ratio(int(accepted.sum()), int(offered.sum())),
        figure5_rate=_ratio(int(emitted.sum()), int(offered.sum()) + rounds),
        verification_budget=_ratio(int(admitted.sum()) + rounds, rounds),
        conditional=tuple(map(_ratio, reached, asked)),
        survival=tuple(
            _ratio(count, int((offered >= k).sum()))
            for k, count in zip(positions, reached, strict=True)
        ),
    )


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
