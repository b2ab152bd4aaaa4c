"""A second device on a machine that has none, which refuses what a GPU refuses.

Its tensors say that they are on "meta", a name that torch knows everywhere and that no code of ours
asks for; their numbers lie on the CPU, and operators run there. Under `SecondDevice` an operator
that mixes tensors of both places raises, whatever creates a tensor creates it on the CPU unless it
names the device or follows an input, and nothing there can be read as numpy. (Numbers alone, of no
dimension, may come from the CPU, as with CUDA.)
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dspark.nn.seams import Binding

THERE = torch.device("meta")
_CROSSING = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_READING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class There(Tensor):
    """A tensor on the second device."""

    here: Tensor
    is_meta = False  # it has numbers
    reads = 0
    """How often somebody waited for numbers of the device, so far."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made: There = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(),
            dtype=here.dtype, device=THERE,
        )  # fmt: skip
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"There({self.here})"

    def tolist(self) -> Any:
        There.reads += 1
        return self.here.tolist()


class SecondDevice(TorchDispatchMode):
    """The device is there inside the block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = any(isinstance(tensor, There) for tensor in tensors)
    if there and func not in _CROSSING:
        foreign = [t for t in tensors if not isinstance(t, There) and t.dim()]
        if foreign:
            raise RuntimeError(f"{func}: tensors on two devices, {foreign[0].shape} on the CPU")
    device = kwargs.get("device")
    There.reads += there and (
        func in _READING or (device is not None and torch.device(device) != THERE)
    )
    if device is not None:
        there = torch.device(device) == THERE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = func(*tree_map(_inside, args), **tree_map(_inside, kwargs))
    written = [
        args[i] if i < len(args) else kwargs[argument.name]
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written and func._schema.returns:
        assert len(written) == 1, func
        return written[0]
    return tree_map(_outside, out) if there else out


def _inside(value: Any) -> Any:
    return value.here if isinstance(value, There) else value


def _outside(value: Any) -> Any:
    return There(value) if isinstance(value, Tensor) else value


def model_there(model: Any) -> Any:
    """The model with its parameters there."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(There(parameter.detach().clone()))
    return model


def binding_there(binding: Binding) -> Binding:
    """The binding with its tables there."""
    tables = {name: There(getattr(binding, name)) for name in ("embedding_VD", "lm_head_VD")}
    return dataclasses.replace(binding, **tables)
