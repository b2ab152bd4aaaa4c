"""What a second is worth: recent throughput, in tokens a second of the modelled machine.

Time is the cost model's, not the clock's. What lambda is weighed against are modelled seconds as
well, so a machine that slows down as a whole changes no decision, and a run can be repeated.
"""

from dataclasses import dataclass

from dspark.core.records import StepRecord
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.policies import RoundView

_WEIGHT = 0.05
"""Of the newest step: about the last 20 count."""


@dataclass(slots=True)
class Throughput:
    """Keeps the recent speed-up over plain decoding under the same load, not the rate itself: so it
    stays right when requests come and go."""

    cost: CostModel
    speedup: float = 1.0

    def rate(self, view: RoundView) -> float:
        """Tokens a second that requests like these have made lately (lambda), or would make without
        any draft, whichever is more.

        Prompt tokens of the step are left out: their work must be done in any case, and it emits
        nothing.
        """
        requests = len(view.requests)
        return max(1.0, self.speedup) * requests / self._plain_seconds(view)

    def observe(self, view: RoundView, record: StepRecord) -> None:
        """`view` is that of the step's policy decisions."""
        if not record.rounds or record.prefill_tokens:
            return
        requests, context = len(view.requests), float(view.context_R.sum())
        drafting = sum(item.proposed > 0 for item in record.rounds)
        length = max(item.proposed for item in record.rounds)
        seconds = float(
            self.cost.step_seconds(record.batch_tokens, requests=requests, context_tokens=context)
        ) + self.cost.draft_seconds(
            drafting, length=length, requests=requests, context_tokens=context
        )
        emitted = sum(item.emitted for item in record.rounds)
        speedup = emitted / requests * self._plain_seconds(view) / seconds
        self.speedup += _WEIGHT * (speedup - self.speedup)

    def _plain_seconds(self, view: RoundView) -> float:
        requests = len(view.requests)
        return float(
            self.cost.step_seconds(
                requests, requests=requests, context_tokens=float(view.context_R.sum())
            )
        )
