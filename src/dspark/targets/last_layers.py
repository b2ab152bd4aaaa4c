"""A target's last decoder layers in the form of a draft layer, so that a drafter can start from
them: pre-norm, norms that multiply by their weight, nothing behind a block's output, a matrix for
each projection."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_BEFORE_MLP = "pre_feedforward_layernorm"
_SANDWICH = {
    "post_attention_layernorm": "self_attn.o_proj.weight",
    "post_feedforward_layernorm": "mlp.down_proj.weight",
}
"""Where Gemma 2 and 3 normalise a block's output, and the matrix that it comes from."""


@torch.no_grad()
def last_layers(
    model: Any, count: int, sample: Callable[[], list[int]]
) -> tuple[dict[str, Tensor], ...]:
    """Weights (float32) of the last `count` decoder layers, under Llama's and Qwen3's names; the
    last one also holds the final norm, "norm.weight".

    A norm's weight is what it multiplies a normalised input with (Gemma stores one less). A layer
    with norms on both sides of a block (Gemma 2 and 3) has those in front under the usual names;
    those behind, which a draft layer has no place for, are folded into the matrix in front of them
    with the size that its output has on some tokens of text, which `sample` is asked for. Fused
    projections (Phi-3) are cut. Where a target's scores are not divided by the root of the head's
    width (Gemma, Granite), or its blocks' outputs are scaled (Granite), weights hold the factor.
    """
    decoder = model.get_decoder()
    modules = list(decoder.layers)[max(0, len(decoder.layers) - count) :]
    sizes = _output_sizes(model, modules, sample()) if modules and _is_sandwich(modules[-1]) else {}
    layers = []
    for module in modules:
        weights = {name: t.detach().float().clone() for name, t in module.state_dict().items()}
        for name, norm in module.named_modules():
            if name.endswith("norm") and f"{name}.weight" in weights:
                weights[f"{name}.weight"] = _multiplier(norm)
        if _is_sandwich(module):
            for name, matrix in _SANDWICH.items():
                behind = weights.pop(f"{name}.weight") / sizes[module.get_submodule(name)]
                weights[matrix] = weights[matrix] * behind[:, None]
            weights["post_attention_layernorm.weight"] = weights.pop(f"{_BEFORE_MLP}.weight")
        layers.append(_scaled(_split(weights, decoder.config), module))
    if layers and getattr(getattr(decoder, "norm", None), "weight", None) is not None:
        layers[-1]["norm.weight"] = _multiplier(decoder.norm)
    return tuple(layers)


def _is_sandwich(layer: nn.Module) -> bool:
    return all(hasattr(layer, name) for name in (_BEFORE_MLP, *_SANDWICH))


def _split(weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    fused = weights.pop("self_attn.qkv_proj.weight", None)
    if fused is not None:
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        keys = config.num_key_value_heads * (len(fused) // heads)
        names = ("q_proj", "k_proj", "v_proj")
        parts = fused.split([len(fused) - 2 * keys, keys, keys])
        weights |= {f"self_attn.{n}.weight": t for n, t in zip(names, parts, strict=True)}
    fused = weights.pop("mlp.gate_up_proj.weight", None)
    if fused is not None:
        gate, up = fused.chunk(2)
        weights |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    return weights


def _scaled(weights: dict[str, Tensor], layer: Any) -> dict[str, Tensor]:
    attention = layer.self_attn
    scaling, head_dim = getattr(attention, "scaling", None), getattr(attention, "head_dim", None)
    if scaling is not None and head_dim is not None:
        name = "self_attn.q_norm.weight"
        name = name if name in weights else "self_attn.q_proj.weight"
        factor = scaling * head_dim**0.5
        if name in weights and abs(factor - 1.0) > 1e-6:
            weights[name] = weights[name] * factor
    residual = getattr(layer, "residual_multiplier", 1.0)
    for name in _SANDWICH.values():
        if name in weights:
            weights[name] = weights[name] * residual
    return weights


def _multiplier(norm: Any) -> Tensor:
    """What `norm` makes of ones, if it is an RMS norm, whichever way it stores its weight; else its
    weight."""
    weight: Tensor = norm.weight.detach()
    ones = 1024 * torch.ones_like(weight)  # beside which eps is nothing
    out = norm(ones[None])[0].float()
    is_rms = torch.equal(norm(-ones[None])[0].float(), -out)  # a layer norm makes 0 of both
    return out if is_rms and bool(out.any()) else weight.float().clone()


def _output_sizes(
    model: Any, layers: list[nn.Module], sample: list[int]
) -> dict[nn.Module, Tensor]:
    """The median root mean square over tokens of what each norm behind a block gets to see."""
    sizes: dict[nn.Module, Tensor] = {}

    def measure(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes[norm] = inputs[0].float().square().mean(-1).sqrt().median()

    norms = [layer.get_submodule(name) for layer in layers for name in _SANDWICH]
    hooks = [norm.register_forward_pre_hook(measure) for norm in norms]
    try:
        model(torch.tensor([sample], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return sizes
