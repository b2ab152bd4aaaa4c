"""How a drafter is trained. Frozen and strict: an unknown key fails and names the nearest one."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from dspark.core.errors import ConfigError
from dspark.training.objective import Objective
from dspark.training.precision import ComputeDtype

FeatureMode = Literal["bf16", "int8", "none"]
"""How features are stored; none: they are computed in every step."""
FEATURE_MODES: tuple[str, ...] = get_args(FeatureMode)
Start = Literal["target", "noise", "bundle"]

EVERY_ANCHOR = 2**31 - 1
"""For `anchors_per_sequence`: every position of a response starts a block in every epoch."""

_FREE_ON_RESUME = frozenset({"max_seconds", "save_every_seconds", "log_every", "validate_every"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The released recipe where it has a value; sizes are for a small target on a CPU."""

    steps: int = 2000
    anchors_per_step: int = 256
    """Blocks a step; times the block size, its drafted positions."""
    anchors_per_sequence: int = 32
    """At most this many of a sequence's anchors in one epoch: fewer is more variety in a step."""
    validation_anchors: int = 32
    """Blocks of a held-out sequence, evenly spaced: the same for every drafter."""
    learning_rate: float = 6e-4
    warmup: float = 0.04
    """Share of the steps with a rising learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of the whole gradient."""
    objective: Objective = field(default_factory=Objective)
    seed: int = 42
    start: Start = "target"
    """What the weights started from; the caller sets them, this records it."""
    compute_dtype: ComputeDtype = "auto"
    """Of matrix products; master weights, softmax and losses are float32.
    auto is bfloat16 where the device has matrix units for it (`training.precision`)."""
    max_seconds: float | None = None
    """Stop cleanly after this long, to be resumed."""
    save_every_seconds: float = 120.0
    log_every: int = 20
    validate_every: int = 500
    """Steps between validations; there is one at the end in any case."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "anchors_per_step",
            "anchors_per_sequence",
            "validation_anchors",
            "log_every",
            "validate_every",
        ):
            value = getattr(self, name)
            _require(isinstance(value, int) and value >= 1, name, value, "a positive integer")
        _require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "above 0")
        _require(0 <= self.warmup <= 1, "warmup", self.warmup, "in [0, 1]")
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "in [0, 1)")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")
        _require(self.clip > 0, "clip", self.clip, "above 0")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2^63)")
        for name, kind in (("compute_dtype", ComputeDtype), ("start", Start)):
            allowed = kind.__args__  # type: ignore[attr-defined]
            _require(
                getattr(self, name) in allowed, name, getattr(self, name), " or ".join(allowed)
            )
        if self.max_seconds is not None:
            _require(self.max_seconds > 0, "max_seconds", self.max_seconds, "above 0")
        _require(
            self.save_every_seconds > 0, "save_every_seconds", self.save_every_seconds, "above 0"
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        values = dict(_known(values, cls))
        if "objective" in values:
            values["objective"] = Objective(**_known(values["objective"], Objective))
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "betas": list(self.betas)}

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        """ConfigError if resuming a run saved with `saved` would not continue the same run."""
        begun = type(self).from_dict(saved).to_dict()  # keys it did not know have their defaults
        for name, ours in self.to_dict().items():
            if name not in _FREE_ON_RESUME and begun[name] != ours:
                raise ConfigError(
                    f"this run was started with {name} {begun[name]}, not {ours}; "
                    f"resume it unchanged, or start another run folder"
                )

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine that would reach 0 at `steps`: step 0 already moves, and so
        does the last one, however short the run."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        done = (step - warm) / (self.steps - warm)
        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


def _known(values: Mapping[str, Any], cls: type) -> Mapping[str, Any]:
    names = [entry.name for entry in fields(cls)]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
            raise ConfigError(f"unknown training key {key!r}; did you mean {near[0]!r}?")
    return values


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value}; it must be {allowed}")
