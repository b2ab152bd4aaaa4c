"""Where a round's time goes, from step records."""

from collections.abc import Iterable

from dspark.core.records import StepRecord


def phase_shares(records: Iterable[StepRecord]) -> dict[str, float]:
    """Share of the time of decoding steps by phase; the shares add up to 1. Empty without a step.

    Steps that also process prompts are left out: they would mix the cost of prefill into a round's.
    """
    totals: dict[str, float] = {}
    for record in records:
        if record.rounds and not record.prefill_tokens:
            for phase, seconds in record.seconds.items():
                totals[phase] = totals.get(phase, 0.0) + seconds
    everything = sum(totals.values())
    if not everything:
        return {}
    return {phase: seconds / everything for phase, seconds in totals.items()}


def time_per_token(first: float, last: float, tokens: int) -> float | None:
    """Seconds per output token after the first one (TPOT); None for a text of one token."""
    return (last - first) / (tokens - 1) if tokens > 1 else None
