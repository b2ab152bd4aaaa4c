"""A drafter's kind and size, and the configuration that they make with a target."""

import difflib
from dataclasses import dataclass
from typing import Any

from dspark.checkpoints.bundle import CANDIDATES
from dspark.core.errors import ConfigError
from dspark.drafters.config import DraftConfig, DSparkConfig, Eagle3Config, MtpConfig
from dspark.nn.seams import Binding

CHAINS = ("eagle3", "mtp")
"""One layer, run token by token."""
DRAFTERS = ("dspark", "dspark-gated", "dspark-rnn", "dflash", *CHAINS)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftShape:
    """The drafter's kind and size; everything else follows the target."""

    drafter: str = "dspark"
    """One of `DRAFTERS`."""
    layers: int = 3
    """Of dspark and dflash; eagle3 and mtp have one."""
    block_size: int = 7
    """mtp proposes one token."""
    markov_rank: int = 64
    """Of dspark's sequential head."""
    taps: int = 5
    """mtp reads the last layer only."""
    candidates: int = CANDIDATES
    """Of a slot, to draft from when it is served; 0 is all that it may propose."""
    draft_vocabulary: int | None = None
    """Propose only this many tokens, those most frequent in the responses; None proposes any."""

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            near = difflib.get_close_matches(self.drafter, DRAFTERS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"there is no drafter {self.drafter!r}; {hint}there are {', '.join(DRAFTERS)}"
            )
        for name, least in (("layers", 1), ("block_size", 1), ("taps", 1), ("candidates", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.draft_vocabulary is not None and self.draft_vocabulary < 1:
            raise ConfigError(
                f"draft_vocabulary is {self.draft_vocabulary}; it must be at least 1 token"
            )
        if self.drafter.startswith("dspark") and self.markov_rank < 1:
            raise ConfigError(
                f"markov_rank is {self.markov_rank}; without a sequential head it is "
                f"--drafter dflash"
            )

    @property
    def layers_to_start(self) -> int:
        """Draft layers: how many of the target's a fresh run may start from."""
        return 1 if self.drafter in CHAINS else self.layers


def draft_config(target_config: Any, binding: Binding, shape: DraftShape) -> DraftConfig:
    """Qwen3-shaped layers of the target's own sizes, tapping layers spread as the paper's are."""
    heads = target_config.num_attention_heads
    head_dim = getattr(target_config, "head_dim", None) or target_config.hidden_size // heads
    rope = getattr(target_config, "rope_parameters", None) or {}
    layers = binding.num_target_layers
    sizes: dict[str, Any] = {
        "hidden_size": binding.hidden_size,
        "intermediate_size": target_config.intermediate_size,
        "num_hidden_layers": shape.layers_to_start,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target_config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "vocab_size": binding.vocab_size,
        "num_target_layers": layers,
        "rms_norm_eps": target_config.rms_norm_eps,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
    }
    if shape.drafter == "mtp":
        return MtpConfig(target_layer_ids=(layers - 1,), **sizes)
    taps = tap_layers(layers, shape.taps)
    if shape.drafter == "eagle3":
        return Eagle3Config(target_layer_ids=taps, block_size=shape.block_size, **sizes)
    _, _, head = shape.drafter.partition("-")
    has_head = shape.drafter != "dflash"
    return DSparkConfig(
        target_layer_ids=taps,
        block_size=shape.block_size,
        mask_token_id=binding.mask_token_id,
        markov_rank=shape.markov_rank if has_head else 0,
        markov_head_type=head or "vanilla",
        enable_confidence_head=has_head,
        **sizes,
    )


def tap_layers(layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread from the second to the fourth last, as the paper's taps are.

    Never the last one: engines that follow transformers see it after the final norm.
    """
    first, last = min(1, layers - 2), max(0, layers - 3)
    spread = (first + i * (last - first) / max(1, count - 1) for i in range(count))
    taps = tuple(sorted({round(tap) for tap in spread}))
    if count < 1 or len(taps) < count:
        raise ConfigError(
            f"{count} different taps do not fit a target of {layers} layers; use fewer (--taps)"
        )
    return taps
