"""Linear layers whose weights are packed for CPU inference, and the row counts at which each is
exact.

Kinds (docs/log.md has the measurements that chose them):
    fp32   oneDNN prepacked float32, or plain F.linear where oneDNN is not built in
    bf16   oneDNN prepacked bfloat16 weights and activations, float32 in and out: nearly flat from 1
           to 32 rows where the processor has AMX, so verifying a block costs little more than one
           token
    fp16   FBGEMM half-precision weights, float32 activations (x86)
    int8   weight-only 8-bit with one scale per output channel, bfloat16 activations
    q4     the 4-bit groups of 32 that the weights already lie on (a GGUF of type Q4_0 or Q4_1),
           bfloat16 scales and activations: the least memory traffic, but each row of a block
           costs; what lies on no such grid (an LM head of type Q8_0) becomes int8

A kernel may round a row differently when the number of rows changes. In exact mode a layer cuts its
input into calls of row counts that were measured to agree bit for bit (law 5, nn.exact_rows).
Outside exact mode it runs whatever is fastest.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.core.errors import ConfigError
from dspark.nn.exact_rows import (
    ExactRows,
    Kernel,
    measure_prompt_rows,
    measure_rows,
    probe,
    run_exact,
)
from dspark.nn.four_bit import GROUP, four_bit_grid, nearest_four_bit

WeightKind = Literal["fp32", "bf16", "fp16", "int8", "q4"]
KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
_FEW_BITS = ("int8", "q4")
_PROBED_WIDTH = 2048
_MANY_ROWS = 12
"""From here on few bits cost more than they save (docs/log.md)."""


@dataclass(slots=True)
class RowMode:
    """What all layers of one target know of the rows at hand; the target sets it before each
    forward."""

    exact: bool = True
    prompt_from: int | None = None
    """Rows from here on are prompts (RaggedBatch.prompt_from)."""
    many: bool = False
    """In exact mode every row takes the prompt kernel, where a layer has one of its own. Never
    changed once something was served."""


class PackedLinear(nn.Module):
    """y = x W^T + b with a packed W; x is [..., in], y float32.

    Kernels of few bits unpack each weight for every few rows: best for one token, worst for a
    prompt. So their layers hold the same weights once more for many rows, in the kind that suits
    the processor (`best_kind`). In exact mode, which of the two serves a row follows from what the
    row is and not from the batch: prompts take the second, where the layer sees the `whole` batch,
    all its rows in their order; all rows do where `RowMode.many` says so. Otherwise any batch of
    many rows does.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kind: WeightKind,
        mode: RowMode,
        *,
        whole: bool = True,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().float().contiguous()
        # The kind it really has: exact row counts are measured for that one.
        self.kind, self.kernel = _build(weight, kind)
        self.prompt_kind = second_kind(kind)
        self.prompt_kernel = (
            self.kernel if self.prompt_kind is None else _build(weight, self.prompt_kind)[1]
        )
        self.bias = None if bias is None else bias.detach().float()
        self.mode, self.whole = mode, whole
        self.exact_rows: ExactRows | None = None
        self.exact_prompt_rows: ExactRows | None = None
        """None: prompts take the same counts as other rows, or are not exact."""

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def rows(self, x: Tensor) -> Tensor:
        """The same for x [rows, in]."""
        return self.native_rows(x).float()

    def native_rows(self, x: Tensor) -> Tensor:
        """The same in the kernel's own precision, for what goes on into another product."""
        rows = x.shape[0]
        if rows == 0:  # a prefill chunk asks for no logits, and kernels refuse no rows
            return x.new_empty(0, self.out_features)
        first, parts = self._prompts_from(rows), []
        if first:
            parts.append(self._run(self.kernel, self.exact_rows, x[:first]))
        if first < rows:
            parts.append(self._run(self.prompt_kernel, self.exact_prompt_rows, x[first:]))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y if self.bias is None else y + self.bias

    def _prompts_from(self, rows: int) -> int:
        """The first row that is served as a prompt's."""
        first = self.mode.prompt_from if self.whole else None
        if self.prompt_kind is None and not (self.mode.exact and self.exact_prompt_rows):
            first = None  # the same kernel, and the same rows of it
        elif self.prompt_kind is not None and (
            self.mode.many if self.mode.exact else rows >= _MANY_ROWS
        ):
            first = 0
        return rows if first is None else min(first, rows)

    def _run(self, kernel: Kernel, exact_rows: ExactRows | None, x: Tensor) -> Tensor:
        if self.mode.exact and exact_rows is not None:
            return run_exact(kernel, x, exact_rows)
        return kernel(x)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.kind}"


def _build_fp32(weight: Tensor) -> Kernel:
    if not torch.backends.mkldnn.is_available():
        return lambda x: F.linear(x, weight)
    return _build_onednn(weight)


def _build_onednn(weight: Tensor) -> Kernel:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    pointwise = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: pointwise(x, packed, None, "none", [], "")


def _build_bf16(weight: Tensor) -> Kernel:
    product = _build_onednn(weight.bfloat16())
    return lambda x: product(x.bfloat16())


def _build_fp16(weight: Tensor) -> Kernel:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    product = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: product(x.float(), packed)


def _build_int8(weight: Tensor) -> Kernel:
    scale = weight.abs().amax(dim=1).clamp_min(1e-12) / 127.0
    quantised = torch.round(weight / scale[:, None]).to(torch.int8)
    # The kernel multiplies by a bfloat16 scale, which would cost 8 bits: ours is applied in
    # float32.
    ones = torch.ones_like(scale, dtype=torch.bfloat16)
    # It reads whole vectors of inputs, and beyond the end where they do not fill the last one.
    missing = -weight.shape[1] % 32
    quantised = F.pad(quantised, (0, missing))
    product = torch._weight_int8pack_mm

    def kernel(x: Tensor) -> Tensor:
        x = x.bfloat16()
        return product(F.pad(x, (0, missing)) if missing else x, quantised, ones) * scale

    return kernel


def _build_q4(weight: Tensor) -> Kernel | None:
    """None for weights that it cannot serve as they are."""
    grid = four_bit_grid(weight)
    if grid is None or weight.shape[0] % 64:  # the kernel works through 64 outputs at a time
        return None
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(grid.codes, 1)
    # The kernel computes (code - 8) * scale + zero.
    scale_and_zero = torch.stack([grid.scale, grid.offset + 8 * grid.scale], -1)
    scale_and_zero = scale_and_zero.transpose(0, 1).bfloat16().contiguous()
    product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return lambda x: product(x.bfloat16(), packed, GROUP, scale_and_zero)


_BUILDERS: dict[WeightKind, Callable[[Tensor], Kernel | None]] = {
    "fp32": _build_fp32,
    "bf16": _build_bf16,
    "fp16": _build_fp16,
    "int8": _build_int8,
    "q4": _build_q4,
}


def _build(weight: Tensor, kind: WeightKind) -> tuple[WeightKind, Kernel]:
    """The kernel of a weight, and its kind: int8 where q4 cannot serve it."""
    kernel = _BUILDERS[kind](weight)
    return (kind, kernel) if kernel is not None else _build(weight, "int8")


def check_kind(kind: WeightKind) -> None:
    """Raises ConfigError, naming the remedy, where this machine cannot run a kind."""
    try:
        _build(torch.ones(64, 32), kind)[1](torch.ones(2, 32))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"weights {kind!r} cannot run on this machine ({platform.machine()}: {reason}); "
            f"use --weights fp32"
        ) from error


def best_kind() -> tuple[WeightKind, str]:
    """The kind that suits this processor for speculation, and why (a start-up line)."""
    if torch.cpu._is_amx_tile_supported() and torch.backends.mkldnn.is_available():
        return "bf16", "AMX verifies a block at the cost of a token"
    try:
        check_kind("fp16")
    except ConfigError:
        return "fp32", "no half-precision kernel on this processor"
    return "fp16", "half the memory traffic of fp32"


def second_kind(kind: WeightKind) -> WeightKind | None:
    """The kind that serves many rows beside one of few bits."""
    return best_kind()[0] if kind in _FEW_BITS else None


def measure_exact_rows(
    kind: WeightKind, in_features: int, out_features: int, *, prompts: bool = False
) -> ExactRows | None:
    """The row counts whose results are bit-equal, for one shape; None if there are none.

    Wide outputs are probed on a slice where kernels do not look across them; what prompts take may.
    """
    width = out_features if prompts else min(out_features, _PROBED_WIDTH)
    weight, inputs = probe(in_features, width, prompts=prompts)
    _, kernel = _build(nearest_four_bit(weight) if kind == "q4" else weight, kind)
    return (measure_prompt_rows if prompts else measure_rows)(kernel, inputs)
