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

A kernel may round a row differently when the number of rows changes. `measure_exact_rows` finds,
with probes made to cancel, the row counts that agree bit for bit; in exact mode a layer cuts its
input into tiles of such counts (law 5). Outside exact mode it runs whatever is fastest.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.core.errors import ConfigError
from dspark.nn.four_bit import GROUP, four_bit_grid, nearest_four_bit

WeightKind = Literal["fp32", "bf16", "fp16", "int8", "q4"]
KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
_FEW_BITS = ("int8", "q4")
_MANY_ROWS = 12
"""From here on few bits cost more than they save (docs/log.md)."""

Kernel = Callable[[Tensor], Tensor]
"""[rows, in] -> [rows, out] without bias, in float32 or in the kernel's own precision."""

_PROBED_COUNTS = (*range(1, 65), *range(72, 129, 8), 160, 192, 256)
_REFERENCE_COUNT = 8  # near a verification batch of one request, whose cost matters most


@dataclass(slots=True)
class RowMode:
    """What all layers of one target know of the rows at hand; the target sets it before each
    forward."""

    exact: bool = True
    prompt_from: int | None = None
    """Rows from here on are prompts (RaggedBatch.prompt_from)."""


@dataclass(frozen=True, slots=True)
class ExactRows:
    """Row counts that give bit-equal rows. Empty when the kernel has none worth using."""

    counts: tuple[int, ...]

    @property
    def tile(self) -> int:
        return self.counts[-1]

    def round_up(self, rows: int) -> int:
        return next(count for count in self.counts if count >= rows)


class PackedLinear(nn.Module):
    """y = x W^T + b with a packed W; x is [..., in], y float32.

    Kernels of few bits unpack each weight for every few rows: best for one token, worst for a
    prompt. So their layers hold the same weights once more for many rows, in the kind that suits
    the processor (`best_kind`). In exact mode, which of the two serves a row follows from what the
    row is and not from the batch: prompts take the second, where the layer sees the `whole` batch,
    all its rows in their order. Otherwise any batch of many rows does.
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
        self.prompt_kind = best_kind()[0] if kind in _FEW_BITS else None
        self.prompt_kernel = _build(weight, self.prompt_kind)[1] if self.prompt_kind else None
        self.bias = None if bias is None else bias.detach().float()
        self.mode, self.whole = mode, whole
        self.exact_rows: ExactRows | None = None
        self.exact_prompt_rows: ExactRows | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def rows(self, x: Tensor) -> Tensor:
        """The same for x [rows, in]."""
        return self.native_rows(x).float()

    def native_rows(self, x: Tensor) -> Tensor:
        """The same in the kernel's own precision, for what goes on into another product."""
        split = self.mode.prompt_from if self.whole else None
        if not self.mode.exact and x.shape[0] >= _MANY_ROWS:
            split = 0
        if x.shape[0] == 0:  # a prefill chunk asks for no logits, and kernels refuse no rows
            return x.new_empty(0, self.out_features)
        if self.prompt_kernel is None or split is None or split >= x.shape[0]:
            y = self._run(self.kernel, self.exact_rows, x)
        else:
            y = self._run(self.prompt_kernel, self.exact_prompt_rows, x[split:])
            if split:
                y = torch.cat([self._run(self.kernel, self.exact_rows, x[:split]), y])
        return y if self.bias is None else y + self.bias

    def _run(self, kernel: Kernel, exact_rows: ExactRows | None, x: Tensor) -> Tensor:
        if self.mode.exact and exact_rows is not None:
            return run_exact(kernel, x, exact_rows)
        return kernel(x)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.kind}"


def run_exact(kernel: Kernel, rows: Tensor, exact: ExactRows) -> Tensor:
    """Runs `kernel` in tiles of exact row counts; the last tile is padded up to the next exact
    count."""
    count = rows.shape[0]
    if count in exact.counts:
        return kernel(rows)
    pieces = []
    for start in range(0, count, exact.tile):
        tile = rows[start : start + exact.tile]
        length = tile.shape[0]
        padded = exact.round_up(length)
        if padded > length:
            tile = F.pad(tile, (0, 0, 0, padded - length))
        pieces.append(kernel(tile)[:length])
    return torch.cat(pieces)


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


def measure_exact_rows(kind: WeightKind, in_features: int, out_features: int) -> ExactRows | None:
    """The row counts whose results are bit-equal, for one shape; None if even the reference repeats
    badly.

    The probe makes order visible: inputs hold pairs of large values that cancel through equal
    weights, placed far apart, so that any other order of summation leaves a visible remainder, even
    after the output is rounded to bfloat16. Wide outputs are probed on a slice: kernels do not sum
    across them.
    """
    weight, inputs = _cancelling_probe(
        in_features, min(out_features, 2048), max(_PROBED_COUNTS) + 5
    )
    _, kernel = _build(nearest_four_bit(weight) if kind == "q4" else weight, kind)
    shifted = inputs[5:]
    reference = torch.cat([kernel(tile) for tile in inputs.split(_REFERENCE_COUNT)])
    counts = [
        count
        for count in _PROBED_COUNTS
        if torch.equal(kernel(inputs[:count].contiguous()), reference[:count])
        and torch.equal(kernel(shifted[:count].contiguous()), reference[5 : 5 + count])
    ]
    return ExactRows(tuple(counts)) if counts else None


def _cancelling_probe(in_features: int, out_features: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    weight = torch.randn(out_features, in_features, generator=generator) * 0.04
    weight[:, half : 2 * half] = weight[:, :half]
    inputs = torch.randn(rows, in_features, generator=generator)
    large = torch.randn(rows, half, generator=generator) * 2**12
    inputs[:, :half] += large
    inputs[:, half : 2 * half] -= large
    order = torch.randperm(in_features, generator=generator)
    return weight[:, order].bfloat16().float(), inputs[:, order].bfloat16().float()
