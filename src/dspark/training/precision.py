"""What a step computes in, on whatever device: chosen here, and nowhere else.

Matrix products of the drafter's forward run in bfloat16 where the device has units for them. Master
weights, normalisation, softmax, losses, gradients of weights and the optimiser stay float32.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

ComputeDtype = Literal["auto", "float32", "bfloat16"]


def matrix_dtype(wanted: ComputeDtype, device: torch.device) -> torch.dtype:
    """Of matrix products. auto: bfloat16 where the device has matrix units for it (AMX, or a GPU's
    tensor cores), else float32."""
    if wanted == "auto":
        return torch.bfloat16 if _has_bf16_matrix_units(device) else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The context of a forward whose matrix products are in `dtype`."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def _has_bf16_matrix_units(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return torch.backends.mkldnn.is_available() and probe is not None and bool(probe())
