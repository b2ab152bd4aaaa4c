import pytest
import torch

from dspark.core.errors import ConfigError
from dspark.nn.four_bit import GROUP, four_bit_grid, nearest_four_bit
from dspark.nn.linear import PackedLinear, RowMode, check_kind, measure_exact_rows


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def on_grid(outputs, inputs, *, levels=16, seed=0):
    """Weights as a Q4_1 file holds them: codes times a float16 scale plus a float16 minimum."""
    draw = generator(seed)
    codes = torch.randint(0, levels, (outputs, inputs // GROUP, GROUP), generator=draw)
    scale = (torch.rand(outputs, inputs // GROUP, 1, generator=draw) * 0.05 + 1e-3).half().float()
    low = torch.randn(outputs, inputs // GROUP, 1, generator=draw).half().float()
    return codes.view(outputs, inputs).int(), (codes * scale + low).view(outputs, inputs)


def rebuilt(grid):
    codes = grid.codes.view(len(grid.codes), -1, GROUP)
    return (codes * grid.scale[..., None] + grid.offset[..., None]).view(grid.codes.shape)


@pytest.mark.parametrize("levels", [16, 15, 9, 3, 2, 1])
def test_the_grid_is_read_off_the_weights(levels):
    _, weight = on_grid(64, 96, levels=levels)
    grid = four_bit_grid(weight)
    assert grid is not None
    assert grid.codes.min() >= 0 and grid.codes.max() <= 15
    torch.testing.assert_close(rebuilt(grid), weight, rtol=0, atol=2e-5)


def test_codes_are_those_of_the_file():
    codes, weight = on_grid(64, 64)
    grid = four_bit_grid(weight)
    groups = codes.view(64, 2, GROUP)
    full = (groups.amin(-1) == 0) & (groups.amax(-1) == 15)
    assert full.float().mean() > 0.5
    assert torch.equal(grid.codes.view(64, 2, GROUP)[full], groups[full])


def test_a_few_levels_with_wide_gaps():
    weight = torch.zeros(1, GROUP)
    weight[0, :3] = torch.tensor([1.0, 10.0, 15.0])  # levels 0, 1, 10 and 15 of a step of one
    grid = four_bit_grid(weight)
    torch.testing.assert_close(rebuilt(grid), weight)


def test_any_weights_rounded_to_a_grid():
    weight = torch.randn(64, 104, generator=generator(7))  # the last 8 inputs fill no group
    rounded = nearest_four_bit(weight)
    assert torch.equal(rounded[:, 96:], weight[:, 96:])
    groups = weight[:, :96].view(64, 3, GROUP)
    half_step = (groups.amax(-1) - groups.amin(-1)) / 15 / 2
    error = (rounded - weight)[:, :96].view(64, 3, GROUP).abs().amax(-1)
    assert (error <= half_step * 1.001).all()
    grid = four_bit_grid(rounded[:, :96])
    assert grid is not None
    torch.testing.assert_close(rebuilt(grid), rounded[:, :96], rtol=0, atol=2e-6)
    torch.testing.assert_close(nearest_four_bit(rounded), rounded, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(64, 96, generator=generator()),
        on_grid(64, 96, levels=17, seed=3)[1],  # some group takes 17 levels
        torch.randn(64, 40, generator=generator()),  # no whole groups
    ],
)
def test_other_weights_have_none(weight):
    assert four_bit_grid(weight) is None


def test_one_weight_off_its_grid_is_seen():
    _, weight = on_grid(64, 96)
    weight[13, 50] += 0.3 * (weight[13, 33] - weight[13, 32]).abs() + 1e-3
    assert four_bit_grid(weight) is None


@pytest.fixture
def q4():
    try:
        check_kind("q4")
    except ConfigError:
        pytest.skip("q4 does not run on this machine")


def test_the_product_is_that_of_the_file(q4):
    """As near as bfloat16 activations and scales allow: much nearer than 8-bit weights would be."""
    _, weight = on_grid(128, 256)
    x = torch.randn(5, 256, generator=generator(1))
    expected = x.double() @ weight.double().T
    spread = expected.square().mean().sqrt()
    errors = {}
    for kind in ("q4", "int8", "bf16"):
        layer = PackedLinear(weight, None, kind, RowMode(exact=False))
        errors[kind] = float((layer(x) - expected).abs().max() / spread)
    assert errors["q4"] < 3 * errors["bf16"]


def test_every_row_count_is_exact_on_this_kernel(q4):
    exact = measure_exact_rows("q4", 576, 128)
    if exact is None:
        pytest.skip("q4 has no exact row counts on this machine")
    _, weight = on_grid(128, 576)
    kernel = PackedLinear(weight, None, "q4", RowMode()).kernel
    x = torch.randn(64, 576, generator=generator(2)) * torch.arange(1, 65)[:, None]
    alone = torch.cat([kernel(row[None]) for row in x])
    for count in exact.counts:
        assert torch.equal(kernel(x[:count]), alone[:count]), count


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        (on_grid(64, 96)[1], "q4"),
        (on_grid(96, 96)[1], "int8"),  # not whole tiles of 64 outputs
        (torch.randn(64, 96, generator=generator()), "int8"),
    ],
)
def test_a_layer_says_what_it_became(q4, weight, kind):
    """Exact row counts are measured for the kernel that runs, not for the one asked for."""
    layer = PackedLinear(weight, None, "q4", RowMode(exact=False))
    assert layer.kind == kind
    x = torch.randn(3, 96, generator=generator(1))
    assert torch.equal(layer(x), PackedLinear(weight, None, kind, RowMode(exact=False))(x))


@pytest.mark.parametrize("kind", ["int8", "q4"])
def test_rows_of_prompts_take_their_own_kernel(kind):
    try:
        check_kind(kind)
    except ConfigError:
        pytest.skip(f"{kind} does not run on this machine")
    mode = RowMode(exact=False)
    _, weight = on_grid(64, 96)
    layer = PackedLinear(weight, torch.randn(64, generator=generator(3)), kind, mode)
    x = torch.randn(7, 96, generator=generator(4))
    tokens = layer(x)
    mode.prompt_from = 0
    prompts = layer(x)
    assert not torch.equal(tokens, prompts)
    torch.testing.assert_close(tokens, prompts, rtol=0.05, atol=0.2)
    for split in (1, 4, 7):
        mode.prompt_from = split
        both = layer(x)
        torch.testing.assert_close(both[:split], tokens[:split])
        torch.testing.assert_close(both[split:], prompts[split:])
    bare = PackedLinear(weight, layer.bias, kind, mode, whole=False)
    mode.prompt_from = 0
    assert torch.equal(bare(x), tokens)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_many_rows_take_it_too_where_nothing_is_promised(exact, whole):
    mode = RowMode(exact=exact)
    layer = PackedLinear(on_grid(64, 96)[1], None, "int8", mode, whole=whole)
    seen = []
    kernel, prompt_kernel = layer.kernel, layer.prompt_kernel
    layer.kernel = lambda x: (seen.append(("few", len(x))), kernel(x))[1]
    layer.prompt_kernel = lambda x: (seen.append(("many", len(x))), prompt_kernel(x))[1]
    for rows in (3, 40):
        layer(torch.randn(rows, 96, generator=generator(rows)))
    assert seen == [("few", 3), ("few" if exact else "many", 40)]
