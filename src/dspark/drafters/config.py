"""The shapes of drafters. Field names are DeepSpec's keys of `config.json`, where it has them."""

from dataclasses import dataclass

from dspark.core.errors import ConfigError
from dspark.drafters.heads.markov import KINDS

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_target_layers",
    "block_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """What every trained drafter has: Qwen3 layers over a target's features.

    ConfigError for a value out of range.
    """

    hidden_size: int
    """The target's hidden size; embedding and LM head are shared."""
    intermediate_size: int
    num_hidden_layers: int
    """Draft layers."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    """Tapped decoder layers in the order their outputs are concatenated; -1 is the embedding."""
    block_size: int = 7
    """Slots of a block, each a proposal: slot 0 predicts the token after the anchor."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, f"{name} is {value!r}; it must be at least 1")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            _require(
                isinstance(value, int | float) and value > 0, f"{name} is {value!r}; it must be > 0"
            )
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _require(
            heads % kv_heads == 0,
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}; it must be even")
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        _require(isinstance(ids, tuple) and len(ids) > 0, "target_layer_ids must name a layer")
        for layer in ids:
            _require(
                _is_int(layer) and -1 <= layer <= last,
                f"target_layer_ids has {layer!r}; ids of {last + 1} layers go from -1 to {last}",
            )
        _require(len(set(ids)) == len(ids), f"target_layer_ids {list(ids)} repeats a layer")

    @property
    def feature_size(self) -> int:
        """F: width of a context feature before projection."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def has_confidence(self) -> bool:
        """Whether its blocks come with confidences, for policies and calibration."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkConfig(DraftConfig):
    """A parallel backbone with a sequential head.

    `markov_rank` 0 without a confidence head is DFlash, in the anchor-first form DeepSpec releases.
    """

    mask_token_id: int
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    """vanilla, gated or rnn."""
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    num_anchors: int = 512
    """Anchors per training sequence; recorded for other trainers, unused in inference."""

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        anchors = self.num_anchors
        _require(
            _is_int(anchors) and anchors >= 1, f"num_anchors is {anchors!r}; it must be at least 1"
        )
        for name in ("enable_confidence_head", "confidence_head_with_markov"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} is {value!r}; it must be true or false")
        mask, vocab = self.mask_token_id, self.vocab_size
        _require(
            _is_int(mask) and 0 <= mask < vocab,
            f"mask_token_id is {mask!r}; it must be below {vocab}",
        )
        rank, kind = self.markov_rank, self.markov_head_type
        _require(
            _is_int(rank) and rank >= 0, f"markov_rank is {rank!r}; it must be 0 (off) or more"
        )
        _require(
            rank == 0 or kind in KINDS,
            f"there is no markov_head_type {kind!r}; there are {', '.join(KINDS)}",
        )
        _require(
            rank > 0 or not self.has_markov_confidence,
            "confidence_head_with_markov needs a Markov head, but markov_rank is 0",
        )

    @property
    def has_confidence(self) -> bool:
        return self.enable_confidence_head

    @property
    def has_markov_confidence(self) -> bool:
        return self.enable_confidence_head and self.confidence_head_with_markov


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config(DraftConfig):
    """One layer that feeds on its own states; `block_size` is DeepSpec's `ttt_length`."""

    step_loss_decay: float = 0.8
    """Each later slot's loss weighs so much less; recorded for other trainers."""

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        layers, decay = self.num_hidden_layers, self.step_loss_decay
        _require(layers == 1, f"Eagle3 with {layers} layers is not supported; it has one")
        _require(
            isinstance(decay, int | float) and 0 < decay <= 1,
            f"step_loss_decay is {decay!r}; it must be in (0, 1]",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig(DraftConfig):
    """One DeepSeek-style module over the target's last hidden state; it proposes one token."""

    block_size: int = 1

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        for name in ("num_hidden_layers", "block_size"):
            value = getattr(self, name)
            _require(value == 1, f"{name} is {value}; MTP-1 has one layer and proposes one token")
        _require(
            len(self.target_layer_ids) == 1,
            f"target_layer_ids is {list(self.target_layer_ids)}; MTP reads one layer",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)
