"""DeepSpec's `config.json`, to and from a `DraftConfig`.

MTP is not among DeepSpec's drafters: it has an architecture name of ours and the same keys.
"""

import difflib
from dataclasses import MISSING, asdict, fields
from typing import Any

from dspark.core.errors import CheckpointError, ConfigError
from dspark.drafters.config import DraftConfig, DSparkConfig, Eagle3Config, MtpConfig

ARCHITECTURES: dict[str, type[DraftConfig]] = {
    "Qwen3DSparkModel": DSparkConfig,
    "Qwen3Eagle3Model": Eagle3Config,
    "DSparkMtpModel": MtpConfig,
}

_ELSEWHERE = "convert it to DeepSpec's layout first"
_REFUSED = {
    "Gemma4DSparkModel": "Gemma 4 draft layers differ from Qwen3's and are not built yet",
    "Gemma4Eagle3Model": "Gemma 4 draft layers differ from Qwen3's and are not built yet",
    "LlamaForCausalLMEagle3": "EAGLE-3 files of other trainers have other tensors and a reduced "
    f"vocabulary; {_ELSEWHERE}",
    "DSparkDraftModel": "SpecForge's and DeepSeek-V4's drafters share this name, and differ from "
    f"DeepSpec's in tensors and slot convention; {_ELSEWHERE}",
    "DSparkSpeculator": f"speculators' keys and reduced vocabulary are not read yet; {_ELSEWHERE}",
}

# DeepSpec copies the whole target config into a drafter's. These keys of it change nothing that a
# Qwen3 draft layer computes, or are checked below; any other might, so it is refused, not ignored.
_INHERITED = frozenset({
    "_name_or_path", "architectures", "attention_bias", "attention_dropout", "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "hidden_act", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "layer_types", "max_position_embeddings",
    "max_window_layers", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "rope_parameters", "rope_scaling", "sliding_window",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache", "use_sliding_window",
})  # fmt: skip

# Configs have defaults for new drafters; a file may leave out only what the absence of a head makes
# moot and what inference does not use.
_OPTIONAL = {
    "num_anchors",
    "markov_head_type",
    "confidence_head_with_markov",
    "rope_theta",
    "step_loss_decay",
}
_EAGLE3_ONLY = {"ttt_length", "draft_num_hidden_layers", "target_model_name_or_path"}


def to_deepspec(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """DeepSpec's keys; `dtype` is the stored tensors', such as 'float16'."""
    names = {kind: name for name, kind in ARCHITECTURES.items()}
    keys: dict[str, Any] = {
        "architectures": [names[type(config)]],
        "model_type": "qwen3",
        "dtype": dtype,
        **asdict(config),
        "target_layer_ids": list(config.target_layer_ids),
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
    if isinstance(config, DSparkConfig):
        if config.markov_rank == 0:
            del keys["markov_head_type"]
        if not config.enable_confidence_head:
            del keys["confidence_head_with_markov"]
    if isinstance(config, Eagle3Config):
        keys["ttt_length"] = keys.pop("block_size")
        keys["draft_num_hidden_layers"] = config.num_hidden_layers
    return keys


def from_deepspec(keys: dict[str, Any]) -> DraftConfig:
    """CheckpointError for an architecture or key that is missing, unknown or not supported."""
    kind = _check_architecture(keys)
    own = {item.name: item.default for item in fields(kind)}
    known = {*own, *_INHERITED, "dspark"} | (_EAGLE3_ONLY if kind is Eagle3Config else set())
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "it may change what is computed"
            raise CheckpointError(f"unknown key {key!r}: {hint}")
    if kind is Eagle3Config:
        keys = _eagle3_keys(keys)
    missing = sorted(own.keys() - keys.keys() - _OPTIONAL)
    if missing:
        raise CheckpointError(f"missing keys: {', '.join(missing)}")
    _check_fixed_parts(keys)
    values = {name: keys.get(name, default) for name, default in own.items()}
    values["rope_theta"] = _rope_theta(keys)
    if isinstance(values["target_layer_ids"], list):
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
    assert MISSING not in values.values()
    try:
        return kind(**values)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _eagle3_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """Its own names for the number of layers and slots; `num_hidden_layers` may be the target's."""
    missing = sorted({"ttt_length", "draft_num_hidden_layers"} - keys.keys())
    if missing:
        raise CheckpointError(f"missing keys: {', '.join(missing)}")
    own = {"block_size": keys["ttt_length"], "num_hidden_layers": keys["draft_num_hidden_layers"]}
    return {**keys, **own}


def _check_architecture(keys: dict[str, Any]) -> type[DraftConfig]:
    names = keys.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "none"
    if name not in ARCHITECTURES:
        reason = _REFUSED.get(name, "no drafter of that name is known")
        raise CheckpointError(f"architecture {name} is not {' or '.join(ARCHITECTURES)}: {reason}")
    return ARCHITECTURES[name]


def _check_fixed_parts(keys: dict[str, Any]) -> None:
    for key, only in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("use_sliding_window", False),
    ):
        if keys.get(key, only) != only:
            raise CheckpointError(f"{key} is {keys[key]!r}; draft layers here have {only!r}")
    kinds = {str(kind) for kind in keys.get("layer_types") or ()} - {"full_attention"}
    if kinds:
        raise CheckpointError(f"layer_types has {sorted(kinds)}; only full_attention is supported")


def _rope_theta(keys: dict[str, Any]) -> float:
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"rope_parameters is {rope!r}; it must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    extra = sorted(rope.keys() - {"rope_type", "type", "rope_theta"})
    if kind != "default" or extra:
        what = f"rope_type {kind!r}" + (f" with {', '.join(extra)}" if extra else "")
        raise CheckpointError(f"{what} is not supported; only plain rotary embedding is")
    theta = rope.get("rope_theta", keys.get("rope_theta"))
    if not isinstance(theta, int | float):
        raise CheckpointError(f"rope_theta is {theta!r}; it must be a number")
    return float(theta)
