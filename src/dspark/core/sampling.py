"""What a request may ask of the sampler."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal

from dspark.core.errors import ConfigError
from dspark.core.guided import Guided, guided_value

VerificationRule = Literal["rejection", "coupled"]
RULES: tuple[VerificationRule, ...] = ("rejection", "coupled")

MOST_LOGPROBS = 20
MOST_CHOICES = 128
MOST_STOPS = 64
_WHOLE = ("top_k", "max_new_tokens", "min_tokens", "n", "seed", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled. By default plainly, at temperature 1, as in vLLM.

    Order: `logit_bias`, then penalties (repetition, frequency, presence), then what is forbidden
    (`banned_token_ids`, `min_tokens`, `guided`), then temperature and truncation.

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
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that was generated before; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once for every time that the token was generated; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies negative ones of tokens in the prompt or generated."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of tokens, in [-100, 100] each."""
    banned_token_ids: tuple[int, ...] = ()
    """Never generated."""
    max_new_tokens: int = 256
    """0 generates nothing, and is for `prompt_logprobs` alone."""
    min_tokens: int = 0
    """So many tokens come before one that ends the text; until then, end-of-sequence and stop
    tokens are forbidden and stop strings are not looked for."""
    n: int = 1
    """Choices: independent texts for the same prompt, each with noise of its own."""
    seed: int | None = None
    """Without one, a seed is drawn at admission."""
    verification: VerificationRule | None = None
    """None means `coupled` when a seed is given, else `rejection` (DESIGN decision 7)."""
    speculation: Literal["auto", "off"] | int = "auto"
    """How many draft tokens this request may have verified in a round: what the policy says, none,
    or at most so many."""
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    """Strings that end the text where the first of them is complete. A single one is taken as
    ("...",)."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, beside the target's own end-of-sequence tokens."""
    include_stop: bool = False
    """Leave what ended the text (stop string or stop token) in it."""
    logprobs: int | None = None
    """Log-probabilities of the generated tokens and of so many likeliest ones beside them. They are
    the target's own, before bias, penalties, masks, temperature and truncation, as in vLLM."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, each given the ones before it. The whole prompt is
    computed then, whatever the prefix cache knows of it."""
    guided: Guided | None = None
    """What the text must match: JSON of a schema, a regular expression or a grammar."""

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            optional = name in ("seed", "logprobs", "prompt_logprobs") and value is None
            _check(_whole(value) or optional, name, repr(value), "a whole number")
        _check(0.0 <= self.temperature < math.inf, "temperature", self.temperature, "at least 0")
        _check(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (off) or a count below 2^31")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _check(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_real(value) and -2.0 <= value <= 2.0, name, value, "in [-2, 2]")
        value = self.repetition_penalty
        ok = _real(value) and 0.01 <= value <= 100.0
        _check(ok, "repetition_penalty", value, "in [0.01, 100]; 1 is off")
        least = 1 if self.prompt_logprobs is None else 0
        allowed = "at least 1, or 0 with prompt_logprobs"
        _check(self.max_new_tokens >= least, "max_new_tokens", self.max_new_tokens, allowed)
        ok = 0 <= self.min_tokens <= self.max_new_tokens
        _check(ok, "min_tokens", self.min_tokens, f"in [0, max_new_tokens = {self.max_new_tokens}]")
        _check(1 <= self.n <= MOST_CHOICES, "n", self.n, f"in [1, {MOST_CHOICES}]")
        if self.seed is not None:
            _check(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2^63)")
        if self.verification is not None:
            _check(
                self.verification in RULES, "verification", self.verification, " or ".join(RULES)
            )
        own = self.speculation
        ok = own in ("auto", "off") if isinstance(own, str) else _whole(own) and own >= 1
        _check(ok, "speculation", repr(own), "'auto', 'off' or the most draft tokens (at least 1)")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            ok = count is None or 0 <= count <= MOST_LOGPROBS
            _check(ok, name, count, f"in [0, {MOST_LOGPROBS}]")
        self._normalise()

    def _normalise(self) -> None:
        """Checks the collections and stores them as tuples and a dictionary of its own."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        ok = len(stops) <= MOST_STOPS and all(isinstance(s, str) and s for s in stops)
        _check(ok, "stop", repr(self.stop), f"at most {MOST_STOPS} strings, none of them empty")
        for name in ("stop_token_ids", "banned_token_ids"):
            tokens = tuple(getattr(self, name))
            ok = all(_whole(token) and token >= 0 for token in tokens)
            _check(ok, name, repr(tokens), "token ids, whole numbers from 0")
            object.__setattr__(self, name, tokens)
        _check(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a mapping")
        for token, bias in self.logit_bias.items():
            ok = _whole(token) and token >= 0 and _real(bias) and -100.0 <= bias <= 100.0
            _check(ok, "logit_bias", repr({token: bias}), "{token id: bias in [-100, 100]}")
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        guided_value(self.guided)
        if self.guided is not None:
            ending = "guided decoding ends the text where the grammar does"
            _check(not self.ignore_eos, "ignore_eos", True, f"off: {ending}")
            _check(self.min_tokens == 0, "min_tokens", self.min_tokens, f"0: {ending}")

    @property
    def rule(self) -> VerificationRule:
        """The verification rule this request is decoded under."""
        if self.verification is not None:
            return self.verification
        return "coupled" if self.seed is not None else "rejection"

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def most_draft_tokens(self) -> float:
        """What `speculation` allows a round: 0, a count, or infinity."""
        if isinstance(self.speculation, str):
            return math.inf if self.speculation == "auto" else 0
        return self.speculation


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:  # NaN compares false everywhere, so it lands here too
        raise ConfigError(f"{name} is {value}; it must be {allowed}")
