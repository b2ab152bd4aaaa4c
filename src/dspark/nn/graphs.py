"""Functions of tensors that are captured once and replayed: CUDA graphs.

A step that consists of many small kernels is limited by the processor that starts them. A graph
starts all of them at once, but it is deaf: it runs the same operators on the same memory whatever
it is called with. So a function that is to be captured

* reads nothing but its arguments, weights and the key/value store, all of them on the device,
* looks at no value on the host, and has no size that depends on one,
* may be run again without harm, for it is run to warm up before it is captured.

Batches are padded to a few sizes (`bucket`), and the rows that nobody asked for are set in every
call: those of a larger batch before would write where they wrote then.

`nn.recorder` holds a function to the same rules on a CPU. Graphs have not yet run on a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.core.errors import DSparkError

_WARM_UPS = 2
"""cuBLAS and the allocator settle in the first run; one more is torch's own advice."""


@dataclass(frozen=True, slots=True)
class Captured:
    """`replay` computes `outputs` anew, in place, from the memory that was read at capture."""

    replay: Callable[[], object]
    outputs: tuple[Tensor, ...]


class Capture(Protocol):
    def __call__(self, function: Callable[[], tuple[Tensor, ...]]) -> Captured: ...


class CudaCapture:
    """Captures CUDA graphs on one device. Their temporaries share one pool of memory: replays must
    follow one another, as they do on one stream."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", device
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # A pool ends with the last graph in it, and cannot be taken up again. This one stays.
        self._keeper = torch.cuda.CUDAGraph()
        self._kept = self._record(self._keeper, None, lambda: (torch.zeros(1, device=device),))

    def __call__(self, function: Callable[[], tuple[Tensor, ...]]) -> Captured:
        """Raises DSparkError for what cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        outputs = self._record(graph, self._keeper.pool(), function)
        return Captured(graph.replay, outputs)

    def _record(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: Any,
        function: Callable[[], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        try:
            with torch.cuda.device(self._device):
                caller = torch.cuda.current_stream()
                # Around it all, because a capture that fails leaves its own stream behind.
                with torch.cuda.stream(caller):
                    self._stream.wait_stream(caller)
                    with torch.cuda.stream(self._stream):
                        for _ in range(_WARM_UPS):
                            function()
                    caller.wait_stream(self._stream)
                    # Other threads (texts, the server) may allocate meanwhile: only this one is
                    # bound.
                    with torch.cuda.graph(
                        graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
                    ):
                        return function()
        except RuntimeError as error:
            raise DSparkError(
                "a draft or a verification could not be captured in a CUDA graph; use "
                f"--no-cuda-graphs, or LLM(cuda_graphs=False) ({error})"
            ) from error


class Graphed:
    """A function of tensors [rows, ...] with outputs [rows, ...], captured for one number of rows.

    It is captured on padding alone and kept as a graph, so it holds nothing that its function
    closes over but memory.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        padding: Sequence[Tensor],
        rows: int,
        capture: Capture,
    ) -> None:
        """`padding`: one row of every input, on the device, for the rows that a call leaves."""
        self._padding = tuple(padding)
        self._inputs = tuple(row.expand(rows, *row.shape).clone() for row in padding)
        inputs = self._inputs
        self._captured = capture(lambda: function(*inputs))

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Outputs of at most `rows` rows, in memory of their own. Values may lie on the host."""
        count = len(values[0])
        for memory, value, row in zip(self._inputs, values, self._padding, strict=True):
            memory[:count].copy_(value)
            memory[count:].copy_(row.expand_as(memory[count:]))
        self._captured.replay()
        return tuple(output[:count].clone() for output in self._captured.outputs)


def bucket(count: int, least: int = 1) -> int:
    """The smallest power of two from `count` and `least` on: sizes that graphs are made for."""
    return 1 << (max(count, least) - 1).bit_length()
