"""Which architectures cannot be targets, and why: refused by name before anything runs."""

from typing import Any

from dspark.core.errors import TargetError

_REFUSED = {
    "deepseek_v4": "its compressed, indexed attention bypasses transformers' attention seam",
    "deepseek_v32": "its indexed attention does not go through transformers' attention seam",
    "bloom": "it adds ALiBi position biases to the attention scores",
    "mpt": "it adds ALiBi position biases to the attention scores",
    "falcon": "it computes attention inside its own layers",
    "t5": "it is an encoder-decoder",
    "bart": "it is an encoder-decoder",
}

_RECURRENT_KEYS = (
    "mamba",
    "ssm",
    "conv_L_cache",
    "linear_attention",
    "recurrent",
    "rwkv",
    "time_mix",
)


def check_supported(model: Any) -> None:
    """Raises TargetError, naming the architecture and the reason, if the seam cannot carry it."""
    name = type(model).__name__
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(
            f"{name} cannot be a target: it is an encoder-decoder; use a decoder-only model"
        )
    decoder_config = model.get_decoder().config
    for model_type in (config.model_type, decoder_config.model_type):
        if model_type in _REFUSED:
            raise TargetError(f"{name} cannot be a target: {_REFUSED[model_type]}")
    kinds = " ".join(getattr(decoder_config, "layer_types", None) or ())
    keys = " ".join(vars(decoder_config))
    if (
        "linear" in kinds
        or "mamba" in kinds
        or "conv" in kinds
        or any(k in keys for k in _RECURRENT_KEYS)
    ):
        raise TargetError(
            f"{name} cannot be a target: it keeps a recurrent or convolutional state, which cannot "
            f"be "
            f"rolled back to an accepted prefix"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise TargetError(
            f"{name} cannot be a target: its attention bypasses transformers' attention seam"
        )
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise TargetError(
            f"{name} cannot be a target: its decoder has no plain list of layers and norm"
        )
