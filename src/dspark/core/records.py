"""What one serving step leaves behind: the only source of every serving statistic.

`engine` writes these records; whatever measures or shows something reads them.
"""

from dataclasses import dataclass, field
from typing import Literal

TokenFate = Literal["accepted", "corrected", "bonus", "plain"]
"""How an output token came about: a draft token that was accepted, the target's token after a
rejection, the target's token after a whole accepted run, or plain decoding (prefill's first token
included)."""

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the target: its own, before bias, penalties, masks,
    temperature and truncation."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest token ids with theirs, as many as were asked for, descending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """One request in one decode step. Prefill leaves no RoundRecord."""

    request: int
    round: int
    """Counts every round of the request, abandoned ones included."""
    proposed: int
    """Draft tokens made; 0 is plain decoding."""
    admitted: int
    """Draft tokens offered to verification (the verification budget is 1 + admitted)."""
    accepted: int
    """Accepted draft tokens, cut at the end of the text."""
    emitted: int
    """Tokens that reached the output: accepted + 1, or accepted when the text ended inside."""
    ended: bool
    """The text ended in this round (EOS, stop token or length)."""
    confidence: tuple[float, ...] = ()
    """Raw confidence logits per position; empty without a confidence head."""
    entropy: tuple[float, ...] = ()
    """Entropy of what each position was drafted from, as the drafter alone has it
    (`DraftBlock.entropy_RK`); empty without a confidence head."""
    survival: tuple[float, ...] = ()
    """Calibrated probabilities that the draft is accepted up to each position, as the round was
    scheduled with them; empty without a confidence head."""

    @property
    def judged(self) -> int:
        """Draft tokens whose acceptance counts: those offered, cut where the text ended inside."""
        cut = self.ended and self.emitted == self.accepted
        return self.accepted if cut else self.admitted


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What an operator watches: the state now, and counters that only rise."""

    running: int
    waiting: int
    waiting_tokens: int
    """Prompt and most new tokens of the waiting requests."""
    pages: int
    pages_free: int
    """Held by no request; `pages - pages_free` are."""
    pages_kept: int
    """Those of the free ones that the prefix cache keeps until they are needed."""
    page_size: int
    preemptions: int
    refused: int
    """Requests that were not taken because too much was waiting."""
    prompt_tokens: int
    """Of all admissions, resumed ones included."""
    prefix_hits: int
    prefix_hit_tokens: int
    pages_copied: int
    """Copied to where a request has an extent of its own."""
    pages_evicted: int
    """Taken from the prefix cache for something else."""
    rebuilt_positions: int
    """Positions whose K/V, the drafter's context K/V included, were computed again (law 7)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of the engine over its whole batch."""

    step: int
    batch_tokens: int
    """Rows of the target's forward, prefill included."""
    prefill_tokens: int
    rounds: tuple[RoundRecord, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase: draft (without its sequential head), draft_head, schedule, verify (target
    forward), sample, commit. Phases do not overlap: their sum is the step's time."""
    calibration: int = 0
    """Number of the calibration snapshot it was scheduled with: 0 is the bundle's, one more for
    every refit while serving."""
