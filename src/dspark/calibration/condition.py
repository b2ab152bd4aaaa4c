"""What acceptance depends on besides the drafter: how requests are verified and sampled."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from dspark.core.sampling import SamplingParams, VerificationRule


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """What a slot may propose."""

    candidates: int
    """Tokens per slot that are sampled from."""
    draft_vocabulary: int
    """Token ids that they are chosen from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One way of decoding, for which confidences were or may be calibrated.

    At temperature 0 neither the rule nor the truncation changes anything, so they are set to their
    defaults there: all greedy requests share a condition.
    """

    rule: VerificationRule = "rejection"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    candidates: int
    draft_vocabulary: int

    @classmethod
    def of(cls, sampling: SamplingParams, proposals: CandidateSet) -> "Condition":
        own = asdict(proposals)
        if sampling.temperature == 0:
            return cls(temperature=0.0, **own)
        return cls(
            rule=sampling.rule,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            **own,
        )

    @property
    def is_default(self) -> bool:
        """The paper's: `rejection` at temperature 1 without truncation."""
        return (self.rule, self.temperature, self.top_k, self.top_p, self.min_p) == (
            "rejection", 1.0, 0, 1.0, 0.0,
        )  # fmt: skip

    def distance(self, other: "Condition") -> float:
        """How different acceptance is to be expected; 0 for the same condition.

        Greedy decoding is unlike any sampling, the other rule accepts a few percent less; the rest
        are ranks of nuisances, not measurements.
        """
        greedy = (self.temperature == 0) != (other.temperature == 0)
        return (
            4.0 * greedy
            + 2.0 * (self.rule != other.rule)
            + abs(self.temperature - other.temperature)
            + abs(self.top_p - other.top_p)
            + abs(self.min_p - other.min_p)
            + abs(_inverse(self.top_k) - _inverse(other.top_k))
            + 0.1 * abs(math.log2(self.candidates / other.candidates))
            + 0.1 * abs(math.log2(self.draft_vocabulary / other.draft_vocabulary))
        )

    def __str__(self) -> str:
        if self.temperature == 0:
            how = "temperature 0"
        else:
            how = f"{self.rule}, temperature {self.temperature:g}"
            how += f", top_k {self.top_k}" if self.top_k else ""
            how += f", top_p {self.top_p:g}" if self.top_p < 1 else ""
            how += f", min_p {self.min_p:g}" if self.min_p else ""
        return f"{how}, {self.candidates} candidates of {self.draft_vocabulary} tokens"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _inverse(top_k: int) -> float:
    return 1.0 / top_k if top_k else 0.0
