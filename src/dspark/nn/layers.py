"""The pieces of a Qwen3 decoder layer, as plain functions and two modules.

Normalisation, rotary angles and softmax run in float32 whatever the matrices run in (DESIGN
decision 6).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed and returned in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


class _TrainedRMSNorm(torch.autograd.Function):
    """`rms_norm` with a backward in closed form: on CPU half the time of torch's composite one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse_rms
        ctx.save_for_backward(unit, inverse_rms, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        unit, inverse_rms, weight = ctx.saved_tensors
        along = grad * unit
        grad_weight = along.flatten(0, -2).sum(0)
        mean = (along @ weight).div_(len(weight)).unsqueeze(-1)
        grad_x = (grad * weight).sub_(torch.mul(unit, mean, out=along)).mul_(inverse_rms)
        return grad_x, grad_weight, None


class RMSNorm(nn.Module):
    """RMS normalisation with a plain weight (not 1 + weight)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _TrainedRMSNorm.apply(x.float(), self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos, signed sin), each float32 [*positions.shape, 1, head_dim], for `rotate`.

    Half-split layout: dimension i turns with i + head_dim / 2. The sign of the rotated half sits in
    sin. In bf16 these angles are off by 0.3 rad at a distance of 256 tokens, so they are never
    cast.
    """
    exponents = (
        torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    )
    angles = positions.float()[..., None, None] * theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of heads x [..., heads, head_dim], in float32."""
    cos, signed_sin = angles
    x = x.float()
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)
