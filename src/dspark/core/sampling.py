"""What a request may ask of the sampler."""

import math
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from dspark.core.errors import ConfigError

VerificationRule = Literal["rejection", "coupled"]
RULES: tuple[VerificationRule, ...] = ("rejection", "coupled")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled. By default plainly, at temperature 1, as in vLLM.

    Raises ConfigError, naming the parameter and its range, for a value outside it.
    """

    temperature: float = 1.0
    """0 is greedy decoding: a one-hot distribution on the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    max_new_tokens: int = 256
    seed: int | None = None
    """Without one, a seed is drawn at admission."""
    verification: VerificationRule | None = None
    """None means `coupled` when a seed is given, else `rejection` (DESIGN decision 7)."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = field(default=())
    """Token ids that end the text, beside the target's own end-of-sequence tokens."""

    def __post_init__(self) -> None:
        for name in ("top_k", "max_new_tokens", "seed"):
            value = getattr(self, name)
            whole = isinstance(value, Integral) or (name == "seed" and value is None)
            _check(whole, name, repr(value), "a whole number")
        _check(0.0 <= self.temperature < math.inf, "temperature", self.temperature, "at least 0")
        _check(self.top_k >= 0, "top_k", self.top_k, "0 (off) or a positive count")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _check(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        if self.seed is not None:
            _check(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2^63)")
        if self.verification is not None:
            _check(
                self.verification in RULES, "verification", self.verification, " or ".join(RULES)
            )

    @property
    def rule(self) -> VerificationRule:
        """The verification rule this request is decoded under."""
        if self.verification is not None:
            return self.verification
        return "coupled" if self.seed is not None else "rejection"


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:  # NaN compares false everywhere, so it lands here too
        raise ConfigError(f"{name} is {value}; it must be {allowed}")
