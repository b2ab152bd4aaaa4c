"""Round and step records by hand."""

from dspark.core.records import RoundRecord, StepRecord


def round_record(
    admitted: int, accepted: int, *, ended: bool = False, cut: bool = False, request: int = 0
) -> RoundRecord:
    """cut: the text ended inside the accepted run, at its last token."""
    return RoundRecord(
        request=request,
        round=1,
        proposed=4,
        admitted=admitted,
        accepted=accepted,
        emitted=accepted + (not cut),
        ended=ended or cut,
    )


def step_record(*rounds: RoundRecord, prefill: int = 0, **seconds: float) -> StepRecord:
    return StepRecord(
        step=0, batch_tokens=1, prefill_tokens=prefill, rounds=rounds, seconds=seconds
    )
