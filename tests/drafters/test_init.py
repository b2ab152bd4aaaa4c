import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.core.errors import ConfigError
from dspark.drafters.dspark import DSparkModel, initialise
from dspark.drafters.init import initialise_from_target
from dspark.nn.layers import rms_norm
from dspark.targets.load import make_binding
from dspark.targets.tiny import tiny_model as tiny_target
from tests.drafters.tiny import features, tiny_binding, tiny_config

CONFIG = tiny_config()


def target_layer(seed: int, qk_norm: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "input_layernorm": (24,),
        "post_attention_layernorm": (24,),
        "self_attn.q_proj": (32, 24),
        "self_attn.k_proj": (16, 24),
        "self_attn.v_proj": (16, 24),
        "self_attn.o_proj": (24, 32),
        "mlp.gate_proj": (40, 24),
        "mlp.up_proj": (40, 24),
        "mlp.down_proj": (24, 40),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm": (8,), "self_attn.k_norm": (8,)}
    return {f"{name}.weight": torch.randn(s, generator=generator) for name, s in shapes.items()}


def started(*layers: dict[str, Tensor]) -> DSparkModel:
    model = DSparkModel(CONFIG)
    binding = tiny_binding(CONFIG, init_layers=layers)
    initialise_from_target(model, binding, torch.Generator().manual_seed(0))
    return model


def test_context_keys_are_the_target_layers_keys_of_the_last_tap() -> None:
    sources = [target_layer(seed) for seed in (1, 2, 3)]
    model = started(*sources)
    taps = features(CONFIG, 5)
    last_tap = taps[:, -24:]
    context = model.hidden_norm(model.fc(taps))
    for layer, source in zip(model.layers, sources[-2:], strict=True):
        normed = rms_norm(last_tap, source["input_layernorm.weight"], CONFIG.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            ours = layer.self_attn.get_submodule(name)
            want = F.linear(normed, source[f"self_attn.{name}.weight"])
            torch.testing.assert_close(ours(context), want, atol=1e-4, rtol=1e-4)
            # The block stream goes through input_layernorm first, and meets the same product.
            torch.testing.assert_close(
                ours(layer.input_layernorm(last_tap)), want, atol=1e-4, rtol=1e-4
            )
        for name in ("mlp.gate_proj.weight", "self_attn.o_proj.weight"):
            assert torch.equal(layer.get_parameter(name), source[name])


def test_qk_norms_are_copied_or_keep_the_expected_size() -> None:
    copied = started(target_layer(1, qk_norm=True), target_layer(2, qk_norm=True))
    want = target_layer(2, qk_norm=True)["self_attn.q_norm.weight"]
    assert torch.equal(copied.layers[1].self_attn.q_norm.weight, want)

    attention = started(target_layer(1), target_layer(2)).layers[1].self_attn
    x = torch.randn(20000, 24, generator=torch.Generator().manual_seed(5))
    q = F.linear(x, attention.q_proj.weight).unflatten(-1, (4, 8))
    normed = attention.q_norm(q)
    ratio = normed.square().mean().sqrt() / q.square().mean().sqrt()
    torch.testing.assert_close(ratio.detach(), torch.tensor(1.0), atol=0.02, rtol=0.0)


def test_final_norm_is_copied_when_the_binding_has_it() -> None:
    norm = torch.linspace(1, 2, 24)
    assert torch.equal(
        started(target_layer(1), target_layer(2) | {"norm.weight": norm}).norm.weight, norm
    )
    assert torch.equal(started(target_layer(1), target_layer(2)).norm.weight, torch.ones(24))


def test_targets_that_cannot_start_a_drafter_are_refused() -> None:
    with pytest.raises(ConfigError, match="use at most 1 "):
        started(target_layer(1))
    fused = target_layer(1)
    del fused["self_attn.q_proj.weight"]
    with pytest.raises(ConfigError, match=r"target layer -1 has no self_attn\.q_proj\.weight"):
        started(target_layer(1), fused)
    wide = target_layer(1) | {"mlp.up_proj.weight": torch.zeros(48, 24)}
    with pytest.raises(ConfigError, match=r"mlp\.up_proj\.weight is \[48, 24\], ours \[40, 24\]"):
        started(wide, target_layer(2))


def test_noise_start_repeats_with_its_generator() -> None:
    models = [DSparkModel(CONFIG) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        initialise(model, torch.Generator().manual_seed(seed))
    a, b, c = (model.state_dict() for model in models)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])
    assert abs(float(a["markov_head.markov_w1.weight"].std()) - 0.02) < 0.003
    assert not a["confidence_head.proj.bias"].any()


def test_a_norm_without_a_place_is_refused_by_name() -> None:
    odd = target_layer(2) | {"post_mlp_layernorm.weight": torch.ones(24)}
    with pytest.raises(ConfigError, match=r"post_mlp_layernorm.weight.*--from-noise"):
        started(target_layer(1), odd)


class Tokenizer:
    mask_token_id = 3


def test_starts_from_a_real_architecture() -> None:
    target = tiny_target("llama", seed=0)
    decoder = target.get_decoder()
    with torch.no_grad():
        decoder.norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    binding = make_binding(target, "tiny", Tokenizer(), lambda _: None, init_layers=2)
    shape = decoder.config
    model = DSparkModel(
        tiny_config(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
        )
    )
    initialise_from_target(model, binding, torch.Generator().manual_seed(0))
    assert torch.equal(model.norm.weight, decoder.norm.weight)
    for ours, theirs in zip(model.layers, decoder.layers[-2:], strict=True):
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
