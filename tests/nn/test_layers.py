import torch

from dspark.nn.layers import RMSNorm, SwiGLU, rotary_angles, rotate


def test_rms_norm_is_its_formula_in_float32_even_for_half_inputs() -> None:
    norm = RMSNorm(16, eps=1e-3)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, 16))
        got = norm(x)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)


def test_rotation_turns_half_split_pairs_by_position_times_frequency() -> None:
    theta, head_dim = 100.0, 6
    positions = torch.tensor([0, 3, 41])
    x = torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(0))
    got = rotate(x, rotary_angles(positions, head_dim, theta))
    pairs = torch.complex(x[..., :3].double(), x[..., 3:].double())
    frequencies = theta ** (-torch.arange(3, dtype=torch.float64) / 3)
    turned = pairs * torch.exp(1j * positions[:, None, None] * frequencies)
    want = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_rotary_angles_stay_float32_under_autocast() -> None:
    positions = torch.tensor([4000])
    plain = rotary_angles(positions, 8, 10000.0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = rotary_angles(positions, 8, 10000.0)
    for a, b in zip(plain, cast, strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a, b)


def test_swiglu_is_its_formula() -> None:
    torch.manual_seed(0)
    mlp = SwiGLU(6, 10)
    x = torch.randn(4, 6)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    want = (gate / (1 + (-gate).exp()) * up) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), want)
