"""Starting a drafter from its target instead of from noise."""

import torch
from torch import Tensor, nn

from dspark.core.errors import ConfigError
from dspark.drafters.backbone import DraftLayer
from dspark.drafters.chain import ChainLayer, ChainModel, Eagle3Model, MtpModel
from dspark.drafters.dspark import DSparkModel, initialise
from dspark.drafters.model import DraftModel
from dspark.nn.seams import Binding

_MATRICES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip

_READ_BY_ATTENTION = _MATRICES[:3]

_NORMS = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "norm",
)  # fmt: skip


@torch.no_grad()
def initialise_from_target(model: DraftModel, binding: Binding, generator: torch.Generator) -> None:
    """Starts draft layers from the target's last layers, and the context feature from the last tap.

    * `fc` selects the last tap; the other taps start at zero and are learned.
    * The context skips `input_layernorm`, so that norm's weight is folded into q, k and v, and both
      streams meet the projections as the target's layer would.
    * A target without q/k norms gets norm weights that keep the expected size of q and k for
      unit-variance inputs, so that attention starts about as sharp as the target's.
    * `norm` copies the target's final norm where `binding.init_layers[-1]` has it as "norm.weight".
    * Where a token's embedding stands beside the state (Eagle3's q, k and v; MTP's `eh_proj`), the
      state's half is the target's (or passes it on) and the token's half stays as `initialise`
      leaves it: no layer of the target reads such an input.
    * Heads start as `initialise` leaves them; biases of the target's layers are dropped, there is
      no place for them.

    ConfigError if the target's layers are missing or of other shapes.
    """
    layers = _layers(model)
    sources = binding.init_layers[-len(layers) :]
    if len(sources) < len(layers):
        raise ConfigError(
            f"{len(layers)} draft layers cannot start from {len(sources)} layers of the target; "
            f"use at most {len(sources)} (--layers), or start from noise (--from-noise)"
        )
    initialise(model, generator)
    D = model.config.hidden_size
    if isinstance(model, MtpModel):
        model.eh_proj.weight[:, D:].zero_().fill_diagonal_(1.0)
    else:
        assert isinstance(model, DSparkModel | Eagle3Model), type(model)
        model.fc.weight.zero_()
        model.fc.weight[:, -D:].fill_diagonal_(1.0)
    for index, (layer, source) in enumerate(zip(layers, sources, strict=True)):
        _start_layer(layer, source, f"target layer {index - len(layers)}")
    norm: nn.Parameter = model.get_parameter("norm.weight")
    if "norm.weight" in sources[-1]:
        _copy(norm, sources[-1], "norm.weight", "the target's last layer")


def _layers(model: DraftModel) -> list[DraftLayer | ChainLayer]:
    assert isinstance(model, DSparkModel | ChainModel), type(model)
    return list(model.layers)  # type: ignore[arg-type]


def _start_layer(layer: DraftLayer | ChainLayer, source: dict[str, Tensor], where: str) -> None:
    D = len(layer.input_layernorm.weight)
    for name in source:
        if name.endswith("norm.weight") and name.removesuffix(".weight") not in _NORMS:
            raise ConfigError(
                f"{where} has a {name}, which a draft layer has no place for: no drafter can start "
                f"from this target's layers; start from noise (--from-noise)"
            )
    for name in _MATRICES:
        weight: Tensor = layer.get_parameter(f"{name}.weight")
        if name in _READ_BY_ATTENTION:
            weight = weight[:, -D:]
        _copy(weight, source, f"{name}.weight", where)
    _copy(layer.post_attention_layernorm.weight, source, "post_attention_layernorm.weight", where)
    _copy(layer.input_layernorm.weight, source, "input_layernorm.weight", where)
    attention = layer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[:, -D:].mul_(layer.input_layernorm.weight)
    layer.input_layernorm.weight.fill_(1.0)
    for name, projection, norm in (
        ("self_attn.q_norm.weight", attention.q_proj, attention.q_norm),
        ("self_attn.k_norm.weight", attention.k_proj, attention.k_norm),
    ):
        if name in source:
            _copy(norm.weight, source, name, where)
        else:
            # E[q_i^2] for unit-variance inputs is the squared norm of row i.
            norm.weight.fill_(projection.weight[:, -D:].square().sum(1).mean().sqrt())


def _copy(parameter: Tensor, source: dict[str, Tensor], name: str, where: str) -> None:
    if name not in source:
        raise ConfigError(
            f"{where} has no {name}: no drafter can start from this target's layers; "
            f"start from noise (--from-noise)"
        )
    if source[name].shape != parameter.shape:
        raise ConfigError(
            f"{where}: {name} is {list(source[name].shape)}, ours {list(parameter.shape)}; "
            "take the target's heads, head_dim and intermediate size, or start from noise "
            "(--from-noise)"
        )
    parameter.copy_(source[name])
