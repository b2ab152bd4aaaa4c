import pytest
import torch
from torch.nn import functional as F

from dspark.targets.last_layers import last_layers
from dspark.targets.tiny import tiny_model

SAMPLE = [5, 9, 14, 3, 77, 40, 41, 8, 2, 60]


def model_of(family):
    """With norms that differ from their defaults."""
    model = tiny_model(family, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.2, 1.5, generator=generator)
    return model


def no_sample():
    raise AssertionError("nothing behind a block: no text is needed")


def test_plain_families_are_copied_as_they_are():
    for family in ("llama", "qwen3"):
        model = model_of(family)
        (layer,) = last_layers(model, 1, no_sample)
        own = dict(model.get_decoder().layers[-1].state_dict())
        own["norm.weight"] = model.get_decoder().norm.weight
        assert layer.keys() == own.keys()
        for name, tensor in layer.items():
            assert torch.equal(tensor, own[name].detach()), name


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_layer_with_norms_on_both_sides_becomes_one_without_those_behind(family):
    model = model_of(family)
    seen = {}
    module = model.get_decoder().layers[-1]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        module.get_submodule(name).register_forward_hook(
            lambda _, inputs, out, name=name: seen.update({name: (inputs[0], out)})
        )
    layers = last_layers(model, 2, lambda: SAMPLE)
    assert len(layers) == 2 and "norm.weight" not in layers[0]
    layer = layers[-1]
    assert "pre_feedforward_layernorm.weight" not in layer
    assert "post_feedforward_layernorm.weight" not in layer
    # Gemma multiplies by 1 + weight.
    for ours, theirs in {
        "input_layernorm": module.input_layernorm,
        "post_attention_layernorm": module.pre_feedforward_layernorm,  # in front of the MLP
        "norm": model.get_decoder().norm,
    }.items():
        torch.testing.assert_close(layer[f"{ours}.weight"], 1.0 + theirs.weight.detach())
    for name, behind in {
        "self_attn.o_proj": module.post_attention_layernorm,
        "mlp.down_proj": module.post_feedforward_layernorm,
    }.items():
        into, out = seen[name]
        want, got = behind(out), F.linear(into, layer[f"{name}.weight"])
        # Each token alike but for its size, and of the same size in the middle.
        torch.testing.assert_close(F.cosine_similarity(got, want, dim=-1), torch.ones(1, 10))
        ratio = got.norm(dim=-1) / want.norm(dim=-1)
        torch.testing.assert_close(ratio.median(), torch.tensor(1.0), atol=1e-4, rtol=0)


def test_fused_projections_are_cut_where_the_layer_cuts_them():
    model = model_of("phi3")
    (layer,) = last_layers(model, 1, no_sample)
    module = model.get_decoder().layers[-1]
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(2))
    heads = [F.linear(x, layer[f"self_attn.{name}_proj.weight"]) for name in "qkv"]
    assert [part.shape[1] for part in heads] == [64, 32, 32]
    torch.testing.assert_close(torch.cat(heads, 1), module.self_attn.qkv_proj(x))
    gate, up = (F.linear(x, layer[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    torch.testing.assert_close(module.mlp.down_proj(F.silu(gate) * up), module.mlp(x))
    assert not any("qkv" in name or "gate_up" in name for name in layer)


def test_the_targets_sharpness_and_the_size_of_its_outputs_are_kept():
    """Granite divides scores by 1 / 0.3, not by the root of 16, and halves what a block adds."""
    module = model_of("granite").get_decoder().layers[-1]
    (layer,) = last_layers(model_of("granite"), 1, no_sample)
    own = module.state_dict()
    for name, factor in {"q_proj": 0.3 * 4.0, "k_proj": 1.0, "o_proj": 0.5}.items():
        key = f"self_attn.{name}.weight"
        torch.testing.assert_close(layer[key], factor * own[key])
    torch.testing.assert_close(layer["mlp.down_proj.weight"], 0.5 * own["mlp.down_proj.weight"])

    model = tiny_model("gemma3_text", query_pre_attn_scalar=64)
    (layer,) = last_layers(model, 1, lambda: SAMPLE)
    norm = model.get_decoder().layers[-1].self_attn.q_norm.weight
    torch.testing.assert_close(layer["self_attn.q_norm.weight"], 0.5 * (1.0 + norm.detach()))


def test_no_layer_is_no_work():
    assert last_layers(model_of("gemma3_text"), 0, no_sample) == ()
