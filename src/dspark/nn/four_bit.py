"""Weights that already lie on a 4-bit grid, as those of a Q4_0 or Q4_1 GGUF do.

transformers dequantises such a file to float32. The grid can be read off the numbers again, so a
4-bit kernel serves the codes of the file, with a quarter of bfloat16's memory traffic; the kernel
rounds scales and offsets to bfloat16, as kind bf16 rounds weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale and an offset."""

_LEVELS = 15
_ERROR = 1e-5
"""Of the largest weight of a group: what float32 leaves of a code times a scale plus an offset."""


@dataclass(frozen=True, slots=True)
class FourBitGrid:
    """weight = codes * scale + offset, group by group."""

    codes: Tensor
    """int32 [out, in], 0 to 15."""
    scale: Tensor
    """[out, in / 32]."""
    offset: Tensor
    """[out, in / 32]."""


def four_bit_grid(weight: Tensor) -> FourBitGrid | None:
    """The grid of a float32 weight [out, in], or None if some group of 32 inputs takes more than 16
    or unequally spaced values."""
    outputs, inputs = weight.shape
    if inputs % GROUP:
        return None
    groups = weight.reshape(-1, GROUP)
    offset, top = groups.aminmax(dim=-1, keepdim=True)
    span, largest = top - offset, torch.maximum(top.abs(), offset.abs())
    # Quantisers use both ends of the range, so the step is nearly always this.
    step = span / _LEVELS
    codes, wrong = _fit(groups, offset, step, largest)
    if wrong.any():
        step[wrong] = _least_step(groups[wrong], span[wrong])
        codes, wrong = _fit(groups, offset, step, largest)
        if wrong.any():
            return None
    return FourBitGrid(
        codes.view(outputs, inputs).int(), step.view(outputs, -1), offset.view(outputs, -1)
    )


def nearest_four_bit(weight: Tensor) -> Tensor:
    """The weights [out, in] rounded to such a grid, each group of 32 inputs with its own ends.

    Inputs beyond the last whole group stay as they are.
    """
    outputs, inputs = weight.shape
    whole = inputs // GROUP * GROUP
    groups = weight[:, :whole].reshape(outputs, -1, GROUP)
    low = groups.amin(-1, keepdim=True)
    step = ((groups.amax(-1, keepdim=True) - low) / _LEVELS).clamp_min(1e-6)
    on_grid = ((groups - low) / step).round() * step + low
    return torch.cat([on_grid.reshape(outputs, whole), weight[:, whole:]], dim=1)


def _fit(groups: Tensor, offset: Tensor, step: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes, and which groups [G] they miss."""
    codes = (groups - offset).div_(step.clamp_min(1e-30)).round_()
    error = torch.addcmul(offset, codes, step).sub_(groups).abs_()
    wrong = (error > _ERROR * largest) | (codes > _LEVELS)
    return codes, wrong.any(-1)


def _least_step(groups: Tensor, span: Tensor) -> Tensor:
    """The step [G, 1] of groups that take fewer than 16 of their levels, from their least gap."""
    gaps = groups.sort(-1).values.diff(dim=-1)
    gaps = torch.where(gaps > span / 64, gaps, span)  # equal weights differ by rounding
    # The least gap carries the rounding of two weights: the whole span measures the step better.
    return span / (span / gaps.amin(-1, keepdim=True).clamp_min(1e-30)).round().clamp_min(1)
