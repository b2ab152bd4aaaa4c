"""Linear layers whose weights are packed for CPU inference, and the row counts at which each is
exact.

Kinds (docs/log.md has the measurements that chose them):
    fp32   oneDNN prepacked float32, or plain F.linear where oneDNN is not built in
    bf16   oneDNN prepacked bfloat16 weights and activations, float32 in and out: nearly flat from 1
           to 32 rows where the processor has AMX, so verifying a block costs little more than one
           token
    fp16   FBGEMM half-precision weights, float32 activations (x86)
    int8   weight-only 8-bit with one scale per output channel, bfloat16 activations

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

WeightKind = Literal["fp32", "bf16", "fp16", "int8"]
KINDS: tuple[WeightKind, ...] = get_args(WeightKind)

Kernel = Callable[[Tensor], Tensor]
"""[rows, in] float32 -> [rows, out] float32, without bias."""

_PROBED_COUNTS = (*range(1, 65), *range(72, 129, 8), 160, 192, 256)
_REFERENCE_COUNT = 8  # near a verification batch of one request, whose cost matters most


@dataclass(slots=True)
class ExactMode:
    """The switch that all layers of one target share; the target sets it before each forward."""

    on: bool = True


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
    """y = x W^T + b with a packed W; x is [..., in], float32 in and out."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kind: WeightKind, mode: ExactMode
    ) -> None:
        super().__init__()
        self.kind = kind
        self.out_features, self.in_features = weight.shape
        self.kernel = _BUILDERS[kind](weight.detach().float().contiguous())
        self.bias = None if bias is None else bias.detach().float()
        self.mode = mode
        self.exact_rows: ExactRows | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def rows(self, x: Tensor) -> Tensor:
        """The same for x [rows, in]."""
        if x.shape[0] == 0:  # a prefill chunk asks for no logits, and kernels refuse no rows
            return x.new_empty(0, self.out_features)
        if self.mode.on and self.exact_rows is not None:
            y = run_exact(self.kernel, x, self.exact_rows)
        else:
            y = self.kernel(x)
        return y if self.bias is None else y + self.bias

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
    return lambda x: product(x.bfloat16()).float()


def _build_fp16(weight: Tensor) -> Kernel:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    product = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: product(x, packed)


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
        return product(F.pad(x.bfloat16(), (0, missing)), quantised, ones).float() * scale

    return kernel


_BUILDERS: dict[WeightKind, Callable[[Tensor], Kernel]] = {
    "fp32": _build_fp32,
    "bf16": _build_bf16,
    "fp16": _build_fp16,
    "int8": _build_int8,
}


def check_kind(kind: WeightKind) -> None:
    """Raises ConfigError, naming the remedy, where this machine cannot run a kind."""
    try:
        _BUILDERS[kind](torch.ones(16, 16))(torch.ones(2, 16))
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
    kernel = _BUILDERS[kind](weight)
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
