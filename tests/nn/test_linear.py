"""Packed linears: near fp32, and bit-equal rows where the measurement says so."""

import platform

import pytest
import torch
from torch.nn import functional as F

from dspark.core.errors import ConfigError
from dspark.nn import exact_rows, linear
from dspark.nn.exact_rows import ExactRows, run_exact
from dspark.nn.linear import (
    KINDS,
    PackedLinear,
    RowMode,
    best_kind,
    check_kind,
    measure_exact_rows,
)

# Largest error of a product, relative to the root mean square of the exact result.
LIMITS = {"fp32": 1e-5, "bf16": 0.03, "fp16": 2e-3, "int8": 0.04, "q4": 0.04}  # off its grid: int8


def available(kind):
    try:
        check_kind(kind)
    except ConfigError:
        pytest.skip(f"{kind} does not run on this machine")
    return kind


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 96, 40), (7, 33, 17), (70, 256, 64)])
def test_near_fp32(kind, rows, inputs, outputs):
    available(kind)
    weight, bias, x = random(outputs, inputs), random(outputs, seed=1), random(rows, inputs, seed=2)
    layer = PackedLinear(weight, bias, kind, RowMode(exact=False))
    expected = F.linear(x.double(), weight.double(), bias.double())
    got = layer(x)
    assert got.dtype == torch.float32
    error = (got - expected).abs().max() / expected.square().mean().sqrt()
    assert error < LIMITS[kind]
    assert torch.equal(layer(x[None])[0], got)  # any number of leading dimensions
    if kind != "fp32":
        assert error > 1e-6, "this kind rounds nothing: is it the kind it says?"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on", [True, False])
def test_no_rows_at_all(kind, on):
    layer = PackedLinear(random(8, 16), None, available(kind), RowMode(exact=on))
    layer.exact_rows = ExactRows((4,))
    assert layer(torch.empty(1, 0, 16)).shape == (1, 0, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (120, 97)])
def test_measured_counts_hold_for_other_data(kind, prompts, inputs, outputs):
    exact = measure_exact_rows(available(kind), inputs, outputs, prompts=prompts)
    if exact is None:
        pytest.skip(f"{kind} has no exact row counts on this machine")
    kernel = PackedLinear(random(outputs, inputs), None, kind, RowMode()).kernel
    # Rows and columns of very different sizes, so that any other order of a sum shows.
    most = 600 if prompts else 150
    x = random(most, inputs, seed=1) * torch.exp(2 * random(most, 1, seed=2))
    x = x * torch.exp(random(1, inputs, seed=3))
    whole = run_exact(kernel, x, exact)
    generator = torch.Generator().manual_seed(4)
    for _ in range(20 if prompts else 60):
        count = int(torch.randint(1, most * 2 // 3, (1,), generator=generator))
        start = int(torch.randint(0, most - count, (1,), generator=generator))
        piece = run_exact(kernel, x[start : start + count].contiguous(), exact)
        assert torch.equal(piece, whole[start : start + count]), (start, count)


def off_by_an_ulp(y):
    return torch.nextafter(y, torch.full_like(y, 1e9))


@pytest.mark.parametrize(
    ("rounds_otherwise", "exact"),
    [
        (lambda count: count in (1, 2, 7, 31), set(exact_rows._COUNTS) - {1, 2, 7, 31}),
        (lambda count: count > 20, set(range(1, 21))),
        (lambda count: count != 8, {8}),
    ],
)
def test_a_kernel_that_rounds_by_row_count_is_caught(monkeypatch, rounds_otherwise, exact):
    def build(weight):
        def kernel(x):
            y = (x.double() @ weight[:8].T.double()).float()
            return off_by_an_ulp(y) if rounds_otherwise(len(x)) else y

        return kernel

    monkeypatch.setitem(linear._BUILDERS, "fp32", build)
    assert set(measure_exact_rows("fp32", 32, 16).counts) == exact


def test_a_kernel_that_rounds_by_place_is_caught(monkeypatch):
    def build(weight):
        def kernel(x):
            y = (x.double() @ weight.T.double()).float()
            y[5:] = off_by_an_ulp(y[5:])
            return y

        return kernel

    monkeypatch.setitem(linear._BUILDERS, "fp32", build)
    measured = measure_exact_rows("fp32", 32, 16)
    assert measured is None or max(measured.counts) <= 5


def test_another_order_of_summation_is_caught(monkeypatch):
    def build(weight):
        def kernel(x):
            if len(x) % 2:  # halves summed one after the other
                half = x.shape[1] // 2
                return x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T
            return (x[:, None] @ weight.T)[:, 0]

        return kernel

    monkeypatch.setitem(linear._BUILDERS, "fp32", build)
    measured = measure_exact_rows("fp32", 64, 16)
    assert all(count % 2 == 0 for count in measured.counts)


def two_ways(border):
    """A kernel that sums more than `border` rows in another order, as oneDNN's does."""

    def build(weight):
        def kernel(x):
            y = (x.double() @ weight.T.double()).float()
            return off_by_an_ulp(y) if len(x) > border else y

        return kernel

    return build


@pytest.mark.parametrize("border", [32, 600])
def test_prompts_take_the_counts_that_cut_them_least(monkeypatch, border):
    monkeypatch.setitem(linear._BUILDERS, "fp32", two_ways(border))
    few, many = (measure_exact_rows("fp32", 32, 16, prompts=p) for p in (False, True))
    assert few.counts[-1] == min(border, 256)
    assert many.counts[-1] == 512
    assert many.serves_few == (border == 600)
    assert [padded for _, padded in many.cut(512)] == [512]
    assert len(many.cut(200)) == 1


@pytest.mark.parametrize("counts", [(8,), (3, 6), (40, 48, 64, 128), (*range(1, 33), 512)])
def test_cuts_cover_all_rows_and_pad_little(counts):
    exact = ExactRows(counts)
    for rows in range(1, 700):
        calls = exact.cut(rows)
        assert sum(length for length, _ in calls) == rows
        assert all(length <= padded and padded in counts for length, padded in calls)
        assert all(length == padded for length, padded in calls[:-1])
        last, padded = calls[-1]
        assert padded - last <= max(8, last / 8) or padded == counts[0]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 12, 13, 25])
def test_run_exact_tiles_and_pads(rows):
    seen = []

    def kernel(x):
        seen.append(len(x))
        return x * 2

    x = random(rows, 3)
    assert torch.equal(run_exact(kernel, x, ExactRows((3, 6))), x * 2)
    assert set(seen) <= {3, 6}
    assert sum(seen) - rows < 6
    assert len(seen) == -(-rows // 6)


def test_exact_mode_is_a_switch():
    mode = RowMode(exact=True)
    layer = PackedLinear(random(8, 16), None, "fp32", mode)
    seen = []
    kernel = layer.kernel
    layer.kernel = lambda x: (seen.append(len(x)), kernel(x))[1]
    layer.exact_rows = ExactRows((4,))
    layer(random(6, 16))
    mode.exact = False
    layer(random(6, 16))
    assert seen == [4, 4, 6]


def test_each_of_two_kernels_keeps_to_its_own_row_counts():
    mode = RowMode(exact=True, prompt_from=3)
    layer = PackedLinear(random(8, 32), None, available("int8"), mode)
    seen = {"kernel": [], "prompt_kernel": []}
    for name, counts in seen.items():
        kernel = getattr(layer, name)
        spy = lambda x, kernel=kernel, counts=counts: (counts.append(len(x)), kernel(x))[1]  # noqa: E731
        setattr(layer, name, spy)
    layer.exact_rows, layer.exact_prompt_rows = ExactRows((4,)), ExactRows((5,))
    layer(random(10, 32))
    assert seen == {"kernel": [4], "prompt_kernel": [5, 5]}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("prompt_from", [None, 3])
def test_many_requests_take_one_kernel_for_all_exact_rows(whole, prompt_from):
    """Decoded rows, prompts, few and many of them, and those of an LM head, too."""
    mode = RowMode(exact=True, prompt_from=prompt_from, many=True)
    layer = PackedLinear(random(8, 32), None, available("int8"), mode, whole=whole)
    seen, kernel = [], layer.prompt_kernel
    layer.prompt_kernel = lambda x: (seen.append(len(x)), kernel(x))[1]
    layer.exact_rows, layer.exact_prompt_rows = ExactRows((4,)), ExactRows((5,))
    layer(random(1, 32))
    layer(random(10, 32))
    assert seen == [5, 5, 5]
    mode.exact, mode.prompt_from = False, None
    layer(random(10, 32))
    assert seen == [5, 5, 5], "what promises nothing goes by the batch"


@pytest.mark.parametrize(
    ("exact", "counts", "expected"),
    [
        (True, ExactRows((6,)), [4, 6, 6]),
        (True, None, [4, 4, 4]),  # the class of other rows serves prompts, too
        (False, ExactRows((6,)), [10]),
    ],
)
def test_prompts_may_take_other_row_counts_of_the_same_kernel(exact, counts, expected):
    mode = RowMode(exact=exact, prompt_from=3)
    layer = PackedLinear(random(8, 32), None, "fp32", mode)
    seen, kernel = [], layer.kernel
    layer.kernel = layer.prompt_kernel = lambda x: (seen.append(len(x)), kernel(x))[1]
    layer.exact_rows, layer.exact_prompt_rows = ExactRows((4,)), counts
    x = random(10, 32)
    torch.testing.assert_close(layer(x), F.linear(x, random(8, 32)))
    assert seen == expected


def test_what_a_machine_cannot_run_names_the_remedy(monkeypatch):
    def refuse(weight):
        raise RuntimeError("no such instruction\nsecond line")

    monkeypatch.setitem(linear._BUILDERS, "fp16", refuse)
    with pytest.raises(ConfigError, match=r"no such instruction.*--weights fp32") as caught:
        check_kind("fp16")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert best_kind()[0] == "fp32"


def test_the_best_kind_runs_here():
    kind, reason = best_kind()
    check_kind(kind)
    assert reason
    if platform.machine() in ("x86_64", "AMD64"):
        assert kind != "int8", "never chosen unasked: it is a coarser target"
