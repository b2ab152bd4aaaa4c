"""Swaps a loaded model's layers for faster ones that compute the same thing on a CPU.

* `nn.Linear` becomes `PackedLinear`; q/k/v and gate/up projections that share an input become one
  product.
* RMS norms become one fused call, where a numerical check shows that it is the same function.
* Activations and blocks of experts stay, and are run by rows in exact mode.

What a model does not have in the expected shape is left as it is: packing never changes what is
computed beyond the rounding of the weight kind, which `targets.drift` measures.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.nn.exact_rows import ExactRows
from dspark.nn.linear import PackedLinear, RowMode, WeightKind, measure_exact_rows
from dspark.nn.row_exact import RowActivation, RowByRow
from dspark.targets.fast_path import FastDecoder

_ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _SharedProduct:
    """One product for siblings that are called one after another on the same tensor."""

    def __init__(self, product: PackedLinear, widths: list[int]) -> None:
        self.product = product
        self.widths = widths
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def get(self, x: Tensor, index: int) -> Tensor:
        if self._input is not x:
            self._outputs = self.product(x).split(self.widths, dim=-1)
            self._input = x
        output = self._outputs[index]
        if index == len(self.widths) - 1:
            # The last sibling has been served: hold nothing across layers and steps.
            self._input, self._outputs = None, ()
        return output


class _Sibling(nn.Module):
    def __init__(self, shared: _SharedProduct, index: int) -> None:
        super().__init__()
        self.shared = shared
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.get(x, self.index)


class FusedRMSNorm(nn.Module):
    """x / rms(x) * weight in one call."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Packed:
    mode: RowMode
    """The switch of exact mode, shared by all packed layers."""
    fast: FastDecoder | None
    """The short forward, where the model has its shape."""


def pack_model(
    model: Any, kind: WeightKind, *, allow_fast: bool = True, many_requests: bool = False
) -> Packed:
    """Packs every linear layer and norm of `model` in place.

    many_requests: as in `RowMode.many`.
    """
    mode = RowMode(many=many_requests)
    fast = None
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # torch warns that its quantised prepack is old
        decoder = model.get_decoder()
        if allow_fast and FastDecoder.fits(decoder):
            fast = FastDecoder(decoder, kind, mode)
            decoder.layers = nn.ModuleList()  # their weights live on in `fast`, packed
        # Those do not see all rows of the batch in their order.
        not_whole = {model.get_output_embeddings()}
        for block in filter(_holds_experts, model.modules()):
            not_whole.update(block.modules())
        for parent in list(model.modules()):
            if parent not in not_whole:
                _fuse_siblings(parent, kind, mode)
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:  # a subclass may do more (Phi-MoE routers)
                    packed = PackedLinear(
                        child.weight, child.bias, kind, mode, whole=child not in not_whole
                    )
                    setattr(parent, name, packed)
                elif (norm := _fused_norm(child)) is not None:
                    setattr(parent, name, norm)
                elif type(child).__module__ in _ACTIVATION_MODULES:
                    setattr(parent, name, RowActivation(child, mode))
                elif _holds_experts(child):
                    setattr(parent, name, RowByRow(child, mode))
        _measure_exactness([*packed_layers(model), *(packed_layers(fast) if fast else ())])
    return Packed(mode, fast)


def packed_layers(model: nn.Module) -> Iterable[PackedLinear]:
    for module in model.modules():
        if isinstance(module, PackedLinear):
            yield module
        elif isinstance(module, _Sibling) and module.index == 0:
            yield module.shared.product


def _fuse_siblings(parent: nn.Module, kind: WeightKind, mode: RowMode) -> None:
    for names in _SIBLINGS:
        layers = [getattr(parent, name, None) for name in names]
        linear = [layer for layer in layers if type(layer) is nn.Linear]
        if len(linear) != len(names) or len({layer.in_features for layer in linear}) != 1:
            continue
        weight = torch.cat([layer.weight for layer in linear])
        biases = [layer.bias for layer in linear]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat(
                [
                    b if b is not None else torch.zeros(layer.out_features)
                    for b, layer in zip(biases, linear, strict=True)
                ]
            )
        shared = _SharedProduct(
            PackedLinear(weight, bias, kind, mode), [layer.out_features for layer in linear]
        )
        for index, name in enumerate(names):
            setattr(parent, name, _Sibling(shared, index))


def _fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """A fused norm if `module` is one, judged by what it computes and not by its name alone."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None or weight.ndim != 1:
        return None
    probe = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = module(probe)
    for candidate in (weight.detach().float(), 1.0 + weight.detach().float()):  # Gemma stores w - 1
        fused = FusedRMSNorm(candidate.clone(), float(eps))
        if torch.allclose(fused(probe), expected, rtol=1e-5, atol=1e-6):
            return fused
    return None


def _holds_experts(module: nn.Module) -> bool:
    """Whether it is a router with its experts, which transformers keeps in 3-D tensors."""
    return any(
        parameter.ndim == 3
        for child in module.children()
        for parameter in child.parameters(recurse=False)
    )


def _measure_exactness(layers: list[PackedLinear]) -> None:
    threads = torch.get_num_threads()
    for layer in layers:
        shape = layer.in_features, layer.out_features, threads
        layer.exact_rows = _exact_rows(layer.kind, *shape)
        if layer.whole or layer.mode.many:
            prompts = _exact_prompt_rows(layer.prompt_kind or layer.kind, *shape)
            if prompts is not None and (layer.prompt_kind is not None or not prompts.serves_few):
                layer.exact_prompt_rows = prompts


@cache
def _exact_rows(kind: WeightKind, inputs: int, outputs: int, threads: int) -> ExactRows | None:
    """Measured once a process; `threads` only tells measurements apart."""
    return measure_exact_rows(kind, inputs, outputs)


@cache
def _exact_prompt_rows(
    kind: WeightKind, inputs: int, outputs: int, threads: int
) -> ExactRows | None:
    return measure_exact_rows(kind, inputs, outputs, prompts=True)
