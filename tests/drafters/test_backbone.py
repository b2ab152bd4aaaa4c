import pytest
import torch
from torch import Tensor

from dspark.drafters.backbone import Backbone, group_by_sequence
from dspark.drafters.config import DSparkConfig
from dspark.nn.seams import Binding
from tests.drafters.tiny import features, tiny_binding, tiny_config, tiny_model


def plain_forward(
    model: Backbone, binding: Binding, anchor: int, position: int, context_NF: Tensor
) -> Tensor:
    """One block [K, D], written from the paper's equations 2 and 3 without any of our layers.

    `context_NF` are the features of positions 0 .. position - 1.
    """
    c, w = model.config, dict(model.named_parameters())
    K, N, d = c.block_size, len(context_NF), c.head_dim

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weight

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        half = d // 2
        frequencies = c.rope_theta ** (-torch.arange(half) * 2.0 / d)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    tokens = torch.tensor([anchor] + [c.mask_token_id] * (K - 1))
    x = binding.embedding_VD[tokens] * binding.embedding_scale
    h_context = norm(context_NF @ w["fc.weight"].T, w["hidden_norm.weight"])
    positions = torch.cat([torch.arange(N), position + torch.arange(K)])
    for i in range(c.num_hidden_layers):
        name = f"layers.{i}."
        inner = norm(x, w[name + "input_layernorm.weight"])
        both = torch.cat([h_context, inner])

        def heads(rows: Tensor, part: str, name: str = name) -> Tensor:
            return (rows @ w[f"{name}self_attn.{part}.weight"].T).unflatten(-1, (-1, d))

        q = turn(norm(heads(inner, "q_proj"), w[name + "self_attn.q_norm.weight"]), positions[N:])
        k = turn(norm(heads(both, "k_proj"), w[name + "self_attn.k_norm.weight"]), positions)
        v = heads(both, "v_proj")
        share = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ w[name + "self_attn.o_proj.weight"].T
        inner = norm(x, w[name + "post_attention_layernorm.weight"])
        gate = inner @ w[name + "mlp.gate_proj.weight"].T
        up = inner @ w[name + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[name + "mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"])


class Packed:
    """Two sequences of 6 and 9 positions side by side, with three and two anchors."""

    lengths = (6, 9)
    anchors = ((0, 1), (0, 4), (0, 5), (1, 2), (1, 8))
    """(sequence, position)"""

    def __init__(self, config: DSparkConfig) -> None:
        self.contexts = [features(config, n, seed=n) for n in self.lengths]
        self.features_NF = torch.cat(self.contexts)
        self.positions_N = torch.cat([torch.arange(n) for n in self.lengths])
        self.sequences_N = torch.tensor([s for s, n in enumerate(self.lengths) for _ in range(n)])
        self.tokens_A = torch.tensor([3, 14, 15, 9, 26])
        self.positions_A = torch.tensor([position for _, position in self.anchors])
        sequences_A = torch.tensor([sequence for sequence, _ in self.anchors])
        self.visible_AN = (sequences_A[:, None] == self.sequences_N) & (
            self.positions_N < self.positions_A[:, None]
        )

    def forward(self, model: Backbone, binding: Binding, features_NF: Tensor) -> Tensor:
        return model.forward_blocks(
            binding,
            self.tokens_A,
            self.positions_A,
            features_NF,
            self.positions_N,
            self.visible_AN,
        )


CONFIG = tiny_config()
BINDING = tiny_binding(CONFIG)


def test_packed_blocks_equal_the_plain_form_one_by_one() -> None:
    model, packed = tiny_model(CONFIG), Packed(CONFIG)
    got = packed.forward(model, BINDING, packed.features_NF)
    for a, (sequence, position) in enumerate(packed.anchors):
        context = packed.contexts[sequence][:position]
        want = plain_forward(model, BINDING, int(packed.tokens_A[a]), position, context)
        torch.testing.assert_close(got[a], want, atol=2e-5, rtol=2e-5)


def test_context_is_strictly_before_the_anchor_and_of_the_same_sequence() -> None:
    model, packed = tiny_model(CONFIG), Packed(CONFIG)
    base = packed.forward(model, BINDING, packed.features_NF)
    for row in range(len(packed.features_NF)):
        changed = packed.features_NF.clone()
        changed[row] += 1.0
        moved = packed.forward(model, BINDING, changed)
        for a, (sequence, position) in enumerate(packed.anchors):
            sees = packed.sequences_N[row] == sequence and packed.positions_N[row] < position
            assert torch.equal(moved[a], base[a]) == (not sees), (row, a)


@pytest.mark.parametrize("slot", range(CONFIG.block_size))
def test_block_attention_is_bidirectional(slot: int) -> None:
    """A change of any slot's input reaches every other slot of its block, earlier ones too."""
    model, packed = tiny_model(CONFIG), Packed(CONFIG)
    seen: list[Tensor] = []

    def perturb(_module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[0, slot] += 1.0
        seen.append(x)
        return (x, *args[1:])

    base = packed.forward(model, BINDING, packed.features_NF)
    handle = model.layers[0].register_forward_pre_hook(perturb)
    moved = packed.forward(model, BINDING, packed.features_NF)
    handle.remove()
    assert len(seen) == 1
    assert all(not torch.equal(moved[0, j], base[0, j]) for j in range(CONFIG.block_size))
    assert torch.equal(moved[1:], base[1:])


def test_grouping_is_exact_for_any_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        visible = torch.rand(6, 9, generator=generator) < 0.3
        visible[int(torch.randint(6, (), generator=generator))] = False
        rebuilt = torch.zeros_like(visible)
        covered = []
        for anchors, rows, part in group_by_sequence(visible):
            rebuilt[anchors, rows] = part
            covered += list(range(anchors.start, anchors.stop))
        assert covered == list(range(6))
        assert torch.equal(rebuilt, visible)


def test_packed_sequences_become_one_group_each() -> None:
    packed = Packed(CONFIG)
    groups = group_by_sequence(packed.visible_AN)
    assert [(a.start, a.stop, n.start, n.stop) for a, n, _ in groups] == [
        (0, 3, 0, 5),
        (3, 5, 6, 14),
    ]


def test_autocast_runs_matrices_in_bf16_and_gradients_reach_every_parameter() -> None:
    model, packed = tiny_model(CONFIG), Packed(CONFIG)
    exact = packed.forward(model, BINDING, packed.features_NF)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.fc(packed.features_NF).dtype == torch.bfloat16
        got = packed.forward(model, BINDING, packed.features_NF)
    assert got.dtype == torch.float32
    assert not torch.equal(got, exact)
    torch.testing.assert_close(got, exact, atol=0.15, rtol=0.1)
    got.square().sum().backward()
    silent = [
        name
        for name, parameter in model.named_parameters()
        if not name.startswith(("markov_head", "confidence_head"))
        and (parameter.grad is None or not parameter.grad.any())
    ]
    assert silent == []


def test_features_of_half_precision_are_taken_without_autocast() -> None:
    model, packed = tiny_model(CONFIG), Packed(CONFIG)
    half = packed.features_NF.bfloat16()
    got = packed.forward(model, BINDING, half)
    assert torch.equal(got, packed.forward(model, BINDING, half.float()))
