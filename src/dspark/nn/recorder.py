"""A capture for machines without a GPU: it writes down a function's operators and runs those again.

Like a CUDA graph, a recording keeps the operators and the memory of one run and nothing else. What
the function read on the host is baked in; what it did outside of torch is gone. It refuses what a
graph cannot hold: values brought to the host, data from the host, sizes that depend on values. So
tests hold captured functions to these rules where the capture itself cannot run. It is no faster
than the function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.nn.graphs import Captured

_UNSEEN = ("lift_fresh", "is_nonzero")
"""Operators without a tag: a tensor made of Python numbers, and the truth of one."""


class Recorder:
    def __call__(self, function: Callable[[], tuple[Tensor, ...]]) -> Captured:
        """Raises ValueError for an operator that a graph cannot hold."""
        tape = _Tape()
        with tape:
            outputs = function()
        return Captured(tape.replay, outputs)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _leaves_the_device(func, args):
            raise ValueError(f"a captured function must not call {func}")
        with self:  # operators made of others may hide one that is refused
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, _tensors(result)))
        return result

    def replay(self) -> None:
        for func, args, kwargs, kept in self._calls:
            for memory, fresh in zip(kept, _tensors(func(*args, **kwargs)), strict=True):
                # Views and operators in place have changed what was kept already.
                if memory.untyped_storage().data_ptr() != fresh.untyped_storage().data_ptr():
                    memory.copy_(fresh)


def _leaves_the_device(func: Any, args: tuple[Any, ...]) -> bool:
    if func.overloadpacket.__name__ in _UNSEEN:
        return True
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is torch.ops.aten.index.Tensor:  # as long as no mask is among the indices
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return True


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in _tensors(item)]
    return []
