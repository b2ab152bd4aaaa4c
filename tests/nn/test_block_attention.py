import pytest
import torch
from torch import Tensor

from dspark.nn.block_attention import block_attention


def plain_attention(
    q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> Tensor:
    """One query, one head, one key at a time."""
    A, K, H, d = q.shape
    share = H // ck.shape[1]
    out = torch.zeros(A, K, H, d)
    for a in range(A):
        for j in range(K):
            for h in range(H):
                g = h // share
                rows = [(ck[n, g], cv[n, g]) for n in range(len(ck)) if visible[a, n]]
                rows += [(k[a, i, g], v[a, i, g]) for i in range(K)]
                keys, values = (torch.stack(part) for part in zip(*rows, strict=True))
                out[a, j, h] = ((keys @ q[a, j, h]) * d**-0.5).softmax(0) @ values
    return out.flatten(2)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_equals_plain_attention(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    A, K, H, G, d = 3, 2, 6, 2, 4

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = rand(A, K, H, d), rand(A, K, G, d), rand(A, K, G, d)
    ck, cv = rand(rows, G, d), rand(rows, G, d)
    visible = torch.rand(A, rows, generator=generator) < 0.5
    visible[0] = False  # a block without context attends to itself alone
    got = block_attention(q, ck, cv, k, v, visible)
    torch.testing.assert_close(got, plain_attention(q, ck, cv, k, v, visible))


def test_no_mask_means_all_rows_are_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(shape, generator=generator)
        for shape in ((2, 3, 4, 8), (5, 2, 8), (5, 2, 8), (2, 3, 2, 8), (2, 3, 2, 8))
    ]
    everything = torch.ones(2, 5, dtype=torch.bool)
    assert torch.equal(block_attention(*parts), block_attention(*parts, everything))
