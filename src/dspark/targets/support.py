"""Which architectures cannot be targets, and why: refused by name before anything runs."""

from typing import Any

import torch

from dspark.core.errors import TargetError
from dspark.nn.attention import KEY_TILE
from dspark.nn.kv_cache import KVStore
from dspark.nn.seams import Target
from dspark.targets.drift import target_logits

_ALIBI = "it adds ALiBi position biases to the attention scores"
_RECURRENT = (
    "it keeps a recurrent or convolutional state, which cannot be rolled back to an accepted prefix"
)
_REFUSED = {
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "falcon": "it computes attention inside its own layers",
    "bart": "it is an encoder-decoder",
    "gemma3n_text": "its layers share keys and values",
    "gemma4_text": "its layers differ in head dimension and share keys and values",
}
_UNWRITTEN = 7.0
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_RECURRENT_KEYS = ("mamba", "ssm", "conv_", "linear_attention", "recurrent", "rwkv", "time_mix")


def check_config(config: Any, name: str | None = None) -> None:
    """Raises TargetError, naming the architecture and the reason, for what its configuration tells.

    Needs no weights, so that nobody waits for gigabytes to be refused.
    """
    name = name or (getattr(config, "architectures", None) or [type(config).__name__])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise _cannot(name, "it is an encoder-decoder")
    if config.model_type in _REFUSED:
        raise _cannot(name, _REFUSED[config.model_type])
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind is not None}
    if any(key in text for key in _RECURRENT_KEYS for text in (*kinds, *vars(config))):
        raise _cannot(name, _RECURRENT)
    if strange := sorted(kinds - _LAYER_TYPES):
        raise _cannot(name, f"it has {strange[0]} layers")


def check_supported(model: Any) -> None:
    """Raises TargetError, naming the architecture and the reason, if the seam cannot carry it."""
    name = type(model).__name__
    decoder = model.get_decoder()
    for config in (model.config, decoder.config):
        check_config(config, name)
    if not getattr(model, "_supports_attention_backend", False):
        raise _cannot(name, "its attention bypasses transformers' attention seam")
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise _cannot(name, "its decoder has no plain list of layers and norm")


def check_runs(target: Target, name: str) -> None:
    """Raises TargetError if a step of two tokens fails or gives logits that are not finite, or if a
    layer leaves no keys behind."""
    store = KVStore(target.kv_shape, 2, read_ahead=KEY_TILE, device=target.device)
    for keys in store.keys:
        keys.fill_(_UNWRITTEN)
    try:
        logits_MV = target_logits(
            target, torch.zeros(2, dtype=torch.int64, device=target.device), store
        )
    except Exception as error:  # whatever a model's own code raises
        raise _cannot(name, f"a first step failed ({type(error).__name__}: {error})") from error
    if not torch.isfinite(logits_MV).all():
        raise TargetError(
            f"the logits of {name} are not finite: its weights are damaged, or too large for their "
            f"packed kind; fetch the model again, or use --weights fp32"
        )
    for layer, keys in enumerate(store.keys):
        if (keys[:2] == _UNWRITTEN).all():
            raise _cannot(name, f"layer {layer} bypasses transformers' attention seam")


def _cannot(name: str, reason: str) -> TargetError:
    line = " ".join(f"{name} cannot be a target: {reason}".split())
    return TargetError(f"{line}; use an ordinary decoder-only model")
