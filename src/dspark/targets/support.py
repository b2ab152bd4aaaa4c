"""Which architectures cannot be targets, and why: refused by name before anything runs."""

from typing import Any

import torch

from dspark.core.errors import TargetError
from dspark.nn.attention import KEY_TILE
from dspark.nn.kv_cache import KVStore, PagePool
from dspark.nn.seams import RaggedBatch, Target

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
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_RECURRENT_KEYS = ("mamba", "ssm", "conv_", "linear_attention", "recurrent", "rwkv", "time_mix")


def check_config(config: Any) -> None:
    """Raises TargetError, naming the architecture and the reason, for what its configuration tells.

    Needs no weights, so that nobody waits for gigabytes to be refused.
    """
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
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
    check_config(model.config)
    decoder = model.get_decoder()
    check_config(decoder.config)
    if not getattr(model, "_supports_attention_backend", False):
        raise _cannot(name, "its attention bypasses transformers' attention seam")
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise _cannot(name, "its decoder has no plain list of layers and norm")


def check_runs(target: Target, name: str) -> None:
    """Raises TargetError if a step of two tokens fails, or if a layer left no keys behind."""
    pool = PagePool(1, 2)
    table = pool.allocate(2)
    positions_N = torch.arange(2, device=target.device)
    batch = RaggedBatch(
        tokens_N=torch.zeros_like(positions_N),
        positions_N=positions_N,
        requests_N=torch.zeros_like(positions_N),
        slots_N=table.slots(0, 2).to(target.device),
        starts=(0, 2),
        context_lengths=(2,),
        tables=(table,),
    )
    try:
        store = KVStore(target.kv_shape, 2, read_ahead=KEY_TILE, device=target.device)
        target.forward(batch, store, logit_rows_M=positions_N)
    except Exception as error:  # whatever a model's own code raises
        raise _cannot(name, f"a first step failed ({type(error).__name__}: {error})") from error
    empty = [layer for layer, keys in enumerate(store.keys) if not keys[:2].any()]
    if empty:
        raise _cannot(name, f"layer {empty[0]} bypasses transformers' attention seam")


def _cannot(name: str, reason: str) -> TargetError:
    line = " ".join(f"{name} cannot be a target: {reason}".split())
    return TargetError(f"{line}; use an ordinary decoder-only model")
