"""Bundle folders made by hand, from the names and shapes that DeepSpec writes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, D, FEED, HEADS, KV_HEADS, HEAD_DIM, LAYERS, TAPS, RANK = 61, 24, 40, 4, 2, 8, 2, 3, 6


def deepspec_tensors(*, dflash: bool = False, tables: bool = True) -> dict[str, Tensor]:
    """bf16, as released; `tables` adds the copies of the target's embedding and LM head."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, TAPS * D)}
    shapes |= {"hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(LAYERS):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (D,),
            f"layers.{i}.post_attention_layernorm.weight": (D,),
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, D),
            f"layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, D),
            f"layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, D),
            f"layers.{i}.self_attn.o_proj.weight": (D, HEADS * HEAD_DIM),
            f"layers.{i}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"layers.{i}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"layers.{i}.mlp.gate_proj.weight": (FEED, D),
            f"layers.{i}.mlp.up_proj.weight": (FEED, D),
            f"layers.{i}.mlp.down_proj.weight": (D, FEED),
        }
    if not dflash:
        shapes |= {
            "markov_head.markov_w1.weight": (V, RANK),
            "markov_head.markov_w2.weight": (V, RANK),
            "confidence_head.proj.weight": (1, D + RANK),
            "confidence_head.proj.bias": (1,),
        }
    if tables:
        shapes |= {"embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def deepspec_config(*, dflash: bool = False, **changes: Any) -> dict[str, Any]:
    """`config.json` as DeepSpec writes it for a Qwen3 target, inherited keys included."""
    keys: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": D,
        "intermediate_size": FEED,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": V,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "transformers_version": "5.10.2",
        "num_hidden_layers": LAYERS,
        "num_target_layers": 5,
        "layer_types": ["full_attention"] * LAYERS,
        "tie_word_embeddings": False,
        "block_size": 4,
        "mask_token_id": 60,
        "target_layer_ids": [0, 1, 3],
        "num_anchors": 512,
        "enable_confidence_head": not dflash,
        "markov_rank": 0 if dflash else RANK,
    }
    if not dflash:
        keys |= {"confidence_head_with_markov": True, "markov_head_type": "vanilla"}
    return keys | changes


def write_folder(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
