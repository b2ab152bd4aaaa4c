"""Functions by rows: same values, and rows that do not depend on their company or on threads."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dspark.nn.linear import RowMode
from dspark.nn.row_exact import RowActivation, RowByRow, by_rows


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("width", [64, 1000, 1536, 20032])
@pytest.mark.parametrize("function", [F.silu, gelu_tanh, torch.sigmoid])
def test_rows_are_exact(threads, function, width):
    most = 40 if width > 2000 else 400
    x = 3 * torch.randn(most, width, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([by_rows(function, row[None]) for row in x])
    for count in (2, 3, 7, 21, 22, 43, 100, 111, 214, 399, 400):
        if count <= most:
            assert torch.equal(by_rows(function, x[:count]), alone[:count]), count
    torch.testing.assert_close(alone, function(x))


def test_rows_of_a_wider_tensor_are_exact(threads):
    """As gate and up of one product are."""
    x = 3 * torch.randn(300, 3072, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate = x[:, :1536]
    alone = torch.cat([by_rows(F.silu, row[None].contiguous()) for row in gate])
    for count in (3, 64, 107, 300):
        assert torch.equal(by_rows(F.silu, gate[:count]), alone[:count]), count


def test_a_prompt_takes_few_calls(threads):
    """Pieces that no more than the threads' shares ask for."""
    seen = []
    x = torch.randn(256, 1536)
    by_rows(lambda rows: (seen.append(len(rows)), rows)[1], x)
    assert sum(seen) == 256
    assert seen == ([256] if threads < 5 else [255, 1])


@pytest.mark.parametrize("rows", [0, 1])
def test_hardly_any_rows(threads, rows):
    assert by_rows(F.silu, torch.randn(rows, 100)).shape == (rows, 100)


def test_several_tensors_are_cut_alike():
    a, b = torch.randn(700, 3, 64), torch.randn(700, 1, 64)
    assert torch.equal(by_rows(torch.mul, a, b), a * b)


def test_an_activation_is_the_same_function():
    mode = RowMode(exact=True)
    layer, x = RowActivation(nn.SiLU(), mode), torch.randn(1, 600, 64)
    torch.testing.assert_close(layer(x), F.silu(x))
    mode.exact = False
    assert torch.equal(layer(x), F.silu(x))


class Block(nn.Module):
    def __init__(self, scores):
        super().__init__()
        self.scores, self.calls = scores, []

    def forward(self, x):
        self.calls.append(x.shape[1])
        return (x * 2, x.sum()) if self.scores else x * 2


@pytest.mark.parametrize("scores", [True, False])
def test_row_by_row(scores):
    mode, block = RowMode(exact=True), Block(scores)
    layer, x = RowByRow(block, mode), torch.randn(1, 3, 8)
    hidden = layer(x)[0] if scores else layer(x)
    assert torch.equal(hidden, x * 2) and block.calls == [1, 1, 1]
    mode.exact = False
    layer(x)
    assert block.calls[3:] == [3]
