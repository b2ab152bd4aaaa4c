"""Architectures that cannot be targets are refused by name, with the reason."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.core.errors import TargetError
from dspark.targets.hf import HFTarget
from dspark.targets.support import check_config, check_runs, check_supported
from dspark.targets.tiny import TINY_ARCHITECTURES, tiny_model
from tests.targets.ragged import packed_target

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny(model_type, **config):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))


@pytest.mark.parametrize(
    ("model_type", "config", "name", "reason"),
    [
        ("bart", {"vocab_size": 97, "d_model": 32}, "BartForCausalLM", "encoder-decoder"),
        ("mamba", SMALL, "MambaForCausalLM", "recurrent"),
        ("qwen3_next", SMALL, "Qwen3NextForCausalLM", "recurrent"),
        ("lfm2", SMALL, "Lfm2ForCausalLM", "recurrent"),
        ("bloom", {"vocab_size": 97, "hidden_size": 32, "n_layer": 1}, "BloomForCausalLM", "ALiBi"),
        (
            "mpt",
            {"vocab_size": 97, "d_model": 32, "n_heads": 2, "n_layers": 1},
            "MptForCausalLM",
            "ALiBi",
        ),
        ("falcon", SMALL, "FalconForCausalLM", "inside its own layers"),
        ("rwkv", SMALL, "RwkvForCausalLM", "attention seam"),
        (
            "gpt2",
            {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 2, "eos_token_id": 1}
            | {"bos_token_id": 1},
            "GPT2LMHeadModel",
            "no plain list of layers",
        ),
    ],
)
def test_refused(model_type, config, name, reason):
    model = tiny(model_type, **config)
    with pytest.raises(TargetError, match=reason) as caught:
        check_supported(model)
    assert str(caught.value).startswith(f"{name} cannot be a target: ")
    assert "\n" not in str(caught.value)


def test_the_configuration_is_enough():
    for config, reason in (
        (AutoConfig.for_model("t5"), "encoder-decoder"),
        (AutoConfig.for_model("jamba"), "recurrent"),
        (AutoConfig.for_model("llama4_text"), "chunked_attention"),
        (AutoConfig.for_model("gemma4_text"), "head dimension"),
    ):
        with pytest.raises(TargetError, match=reason):
            check_config(config)


@pytest.mark.parametrize("model_type", TINY_ARCHITECTURES)
def test_what_works_is_let_through(model_type):
    model = tiny_model(model_type, num_hidden_layers=1)
    check_supported(model)
    check_runs(packed_target(model), model_type)


def test_attention_that_never_gets_the_step():
    """Nemotron's layers do not hand the call's keywords on: only a first step shows that."""
    model = tiny(
        "nemotron", **SMALL, num_key_value_heads=2, intermediate_size=32, hidden_act="relu2"
    )
    check_supported(model)
    with pytest.raises(TargetError, match="NemotronForCausalLM cannot be a target: a first step"):
        check_runs(HFTarget(model), type(model).__name__)


def test_a_layer_that_bypasses_the_seam():
    model = tiny_model("phi3", num_hidden_layers=2)
    target = packed_target(model)
    attention = model.get_decoder().layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    with pytest.raises(TargetError, match="layer 1 bypasses"):
        check_runs(target, "Phi3ForCausalLM")


def test_long_rope_stays_within_the_short_factors():
    """Beyond them transformers turns keys by other angles than they were cached at."""
    model = tiny_model(
        "phi3",
        hidden_size=64,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 64,
            "factor": 32.0,
        },
    )
    assert HFTarget(model).max_context == 64
    assert HFTarget(tiny_model("phi3")).max_context == 2048


def test_a_target_must_name_an_end():
    model = tiny_model("llama", eos_token_id=None)
    model.generation_config.eos_token_id = None
    with pytest.raises(TargetError, match="eos_token_id"):
        HFTarget(model)
    model.generation_config.eos_token_id = [5, 7]
    assert HFTarget(model).eos_token_ids == (5, 7)
