"""Captured functions, their rules, and the recorder that holds them to these on a CPU."""

import gc
import inspect
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from dspark.core.errors import DSparkError
from dspark.nn.graphs import CudaCapture, Graphed, bucket
from dspark.nn.recorder import Recorder

TABLE = torch.arange(20.0).view(10, 2)


def graphed(function, rows=4):
    padding = [torch.zeros((), dtype=torch.int64), torch.zeros(3)]
    return Graphed(function, padding, rows, Recorder())


def values(*ids, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(ids), torch.randn(len(ids), 3, generator=generator)


def mixed(ids_R: Tensor, x_R3: Tensor):
    """Views, operators in place, indices, several outputs of one operator, an output twice used."""
    rows = TABLE[ids_R]
    rows[:, 0] = x_R3.sum(1)
    top, where = x_R3.topk(2)
    low = x_R3.expand(2, -1, -1)[1].transpose(0, 1).softmax(0).t()
    rows.add_(top).mul_(low[:, :2])
    return rows, where, torch.cat([rows, top], 1)[:, 1:]


@pytest.mark.parametrize("inference", [False, True])
def test_replays_equal_the_function_whatever_is_asked_in_turn(inference):
    with torch.inference_mode(inference):
        replayed = graphed(mixed)
    for number, ids in enumerate([(3, 1), (9,), (0, 2, 4, 6), (5, 5, 5)]):
        given = values(*ids, seed=number)
        with torch.inference_mode():
            got = replayed(*given)
        for mine, expected in zip(got, mixed(*given), strict=True):
            assert torch.equal(mine, expected)


def test_outputs_are_the_callers_own():
    replayed = graphed(mixed)
    first = replayed(*values(1, 2))
    kept = [output.clone() for output in first]
    replayed(*values(7, 8, seed=5))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_rows_that_nobody_asked_for_are_set_again():
    """Those of a larger batch before would go on writing where they wrote."""
    written = torch.zeros(6, dtype=torch.int64)

    def mark(ids_R: Tensor, x_R3: Tensor):
        written.index_add_(0, ids_R, torch.ones_like(ids_R))
        return (x_R3 * 2,)

    replayed = graphed(mark)
    replayed(*values(2, 3, 4, 5))
    written.zero_()
    replayed(*values(5))
    assert written.tolist() == [3, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("broken", "operator"),
    [
        (lambda ids, x: (x * x.max().item(),), "_local_scalar_dense|item"),
        (lambda ids, x: (x[x.sum(1) > 0],), "index.Tensor"),
        (lambda ids, x: (x.nonzero(),), "nonzero"),
        (lambda ids, x: (x * float(bool((ids > 1).any())),), "_local_scalar_dense|is_nonzero"),
        (lambda ids, x: (x * torch.tensor([1.0, 2.0, 3.0]),), "lift_fresh"),
        (lambda ids, x: (x.masked_select(x > 0),), "masked_select"),
        (lambda ids, x: (ids.repeat_interleave(ids),), "repeat_interleave"),
        (lambda ids, x: (torch.argwhere(x > 0),), "nonzero|argwhere"),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_a_graph_cannot_hold_is_refused(broken, operator, inference):
    with (
        torch.inference_mode(inference),
        pytest.raises(ValueError, match=f"must not call aten.*({operator})"),
    ):
        graphed(broken)


def test_what_is_read_on_the_host_is_baked_in():
    """As in a graph: no operator shows it, so only a comparison of results does."""

    def baked(ids_R: Tensor, x_R3: Tensor):
        return (x_R3 + ids_R.tolist()[0],)

    given = values(2, 3)
    assert not torch.equal(graphed(baked)(*given)[0], baked(*given)[0])


def test_a_function_that_reads_beside_its_inputs_sees_what_was_there():
    beside = [torch.tensor(1.0)]
    replayed = graphed(lambda ids, x: (x * beside[0],))
    beside[0] = torch.tensor(5.0)
    given = values(0)
    assert torch.equal(replayed(*given)[0], given[1])


def test_what_a_function_closes_over_is_not_kept():
    class Owner:
        memory = torch.ones(3)

    def capture():
        owner = Owner()
        return graphed(lambda ids, x: (x * owner.memory,)), weakref.ref(owner)

    replayed, owner = capture()
    gc.collect()
    assert owner() is None
    given = values(1)
    assert torch.equal(replayed(*given)[0], given[1])


def test_buckets():
    assert [bucket(count) for count in (1, 2, 3, 4, 5, 128, 129)] == [1, 2, 4, 4, 8, 128, 256]
    assert bucket(3, 7) == 8 and bucket(9, 7) == 16


class Cuda:
    """Writes down what is asked of `torch.cuda`; its graphs are captured in name only."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[str] = []
        self.now = "caller"
        own = self

        class Stream:
            def __init__(self, device=None, name="aside") -> None:
                self.name = name

            def wait_stream(self, other) -> None:
                own.calls.append(f"{self.name} waits for {other.name}")

        class Graph:
            def pool(self):
                return "the keeper's pool"

            def replay(self) -> None:
                own.calls.append("replay")

        @contextmanager
        def stream(which):
            before, own.now = own.now, which.name
            try:
                yield
            finally:
                own.now = before

        @contextmanager
        def graph(graph, pool=None, stream=None, capture_error_mode="global"):
            own.calls.append(f"capture on {stream.name} in {pool}, {capture_error_mode}")
            own.now = stream.name
            yield  # an error leaves the stream, as torch's own does
            own.now = "caller"

        @contextmanager
        def device(device):
            yield

        accepted = inspect.signature(torch.cuda.graph.__init__).parameters
        assert {"pool", "stream", "capture_error_mode"} <= {*accepted}
        for name, stand_in in {
            "Stream": Stream, "CUDAGraph": Graph, "stream": stream, "graph": graph,
            "device": device, "current_stream": lambda: Stream(name=own.now),
        }.items():  # fmt: skip
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, stand_in)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None: zeros(*size))


def test_a_capture_warms_up_aside_and_shares_one_pool(monkeypatch):
    """Only the order of calls: nothing is captured here."""
    cuda = Cuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda"))
    around = ["aside waits for caller", "caller waits for aside"]
    assert cuda.calls == [*around, "capture on aside in None, thread_local"]
    cuda.calls.clear()
    where: list[str] = []

    def function():
        cuda.calls.append("run")
        where.append(cuda.now)
        return (torch.ones(2),)

    captured = capture(function)
    assert cuda.calls == [
        around[0], "run", "run", around[1],
        "capture on aside in the keeper's pool, thread_local", "run",
    ]  # fmt: skip
    assert where == ["aside"] * 3 and cuda.now == "caller"
    captured.replay()
    assert cuda.calls[-1] == "replay" and torch.equal(captured.outputs[0], torch.ones(2))


def test_what_cannot_be_captured_is_told(monkeypatch):
    cuda = Cuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda"))

    def function():
        if cuda.calls[-1].startswith("capture"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return (torch.ones(1),)

    message = r"could not be captured in a CUDA graph; use --no-cuda-graphs.* \(operation not perm"
    with pytest.raises(DSparkError, match=message):
        capture(function)
    assert cuda.now == "caller"
