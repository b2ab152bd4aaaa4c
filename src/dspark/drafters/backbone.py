"""The parallel backbone: blocks of masks over the target's features (paper, equations 2 and 3).

Tensor names are DeepSpec's: fc, hidden_norm, layers.i.*, norm.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark.drafters.config import DraftConfig, DSparkConfig
from dspark.drafters.model import DraftModel
from dspark.nn.binding import embed
from dspark.nn.block_attention import block_attention
from dspark.nn.layers import RMSNorm, SwiGLU, rotary_angles, rotate
from dspark.nn.seams import Binding

Angles = tuple[Tensor, Tensor]


class Projections(nn.Module):
    """The matrices of Qwen3's attention, from inputs of any width."""

    def __init__(self, config: DraftConfig, width: int) -> None:
        super().__init__()
        d = config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(width, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def queries(self, x: Tensor, angles: Angles) -> Tensor:
        """[..., H, d] of inputs [..., width]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), angles)

    def keys_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Each [..., G, d] of inputs [..., width]."""
        heads = (-1, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).unflatten(-1, heads)), angles)
        return keys, self.v_proj(x).unflatten(-1, heads)


class BlockAttention(Projections):
    """Attention of a draft layer: keys and values come from the context and from the block."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config, config.hidden_size)

    def forward(
        self,
        x_AKD: Tensor,
        angles: Angles,
        context_ND: Tensor,
        context_angles: Angles,
        groups: "Groups",
    ) -> Tensor:
        q = self.queries(x_AKD, angles)
        k, v = self.keys_values(x_AKD, angles)
        # The context feature skips input_layernorm and never evolves from layer to layer.
        context_k, context_v = self.keys_values(context_ND, context_angles)
        anchors, rows, visible = zip(*groups, strict=True)
        pieces = zip(
            cut(q, anchors), cut(context_k, rows), cut(context_v, rows), cut(k, anchors),
            cut(v, anchors), visible, strict=True,
        )  # fmt: skip
        parts = [block_attention(*piece) for piece in pieces]
        return self.o_proj(torch.cat(parts) if len(parts) > 1 else parts[0])


class DraftLayer(nn.Module):
    """A pre-norm Qwen3 decoder layer whose attention also sees the context."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x_AKD: Tensor,
        angles: Angles,
        context_ND: Tensor,
        context_angles: Angles,
        groups: "Groups",
    ) -> Tensor:
        x_AKD = x_AKD + self.self_attn(
            self.input_layernorm(x_AKD), angles, context_ND, context_angles, groups
        )
        return x_AKD + self.mlp(self.post_attention_layernorm(x_AKD))


class Backbone(DraftModel):
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward_blocks(
        self,
        binding: Binding,
        anchors_A: Tensor,
        anchor_positions_A: Tensor,
        context_features_NF: Tensor,
        context_positions_N: Tensor,
        visible_AN: Tensor,
    ) -> Tensor:
        """Hidden states [A, K, D] after the final norm, of one block per anchor; for training.

        Anchors and context rows of several sequences are packed side by side. `visible_AN` (bool)
        says which rows an anchor's block attends to: those of its own sequence strictly before the
        anchor. Slot j stands at position anchor + j and predicts token anchor + j + 1. Keep anchors
        of a sequence together and its rows contiguous: attention then works through one sequence at
        a time.
        """
        config, K = self.config, self.config.block_size
        tokens_AK = anchors_A[:, None].repeat(1, K)
        tokens_AK[:, 1:] = config.mask_token_id
        positions_AK = anchor_positions_A[:, None] + torch.arange(
            K, device=anchor_positions_A.device
        )
        angles = rotary_angles(positions_AK, config.head_dim, config.rope_theta)
        context_angles = rotary_angles(context_positions_N, config.head_dim, config.rope_theta)
        context_NF = context_features_NF.to(self.fc.weight.dtype)  # stored features are bf16
        context_ND = self.hidden_norm(self.fc(context_NF))
        groups = group_by_sequence(visible_AN)
        x_AKD = embed(binding, tokens_AK)
        for layer in self.layers:
            x_AKD = layer(x_AKD, angles, context_ND, context_angles, groups)
        return self.norm(x_AKD)


Groups = list[tuple[slice, slice, Tensor]]
"""Runs of anchors, the context rows that any of them sees, and which sees which."""


def group_by_sequence(visible_AN: Tensor) -> Groups:
    """Cuts [A, N] into runs of neighbouring anchors with the same first visible row.

    Exact for any mask; for packed sequences the runs are the sequences, and nearly all masked
    scores are never computed.
    """
    A, N = visible_AN.shape
    seen = visible_AN.any(1)
    rows = visible_AN.to(torch.int8)  # argmax takes the first of equal values
    firsts = rows.argmax(1).where(seen, 0).tolist()
    ends = (N - rows.flip(1).argmax(1)).where(seen, 0).tolist()
    groups: Groups = []
    start = 0
    for a in range(1, A + 1):
        if a == A or firsts[a] != firsts[start]:
            columns = slice(firsts[start], max(firsts[start], *ends[start:a]))
            groups.append((slice(start, a), columns, visible_AN[start:a, columns]))
            start = a
    return groups


def cut(x: Tensor, slices: Sequence[slice]) -> Sequence[Tensor]:
    """`x[s]` for every slice. Slices that tile `x` are split off together, because the gradient of
    a lone slice is a zeroed copy of all of `x`."""
    edges = [0, *(s.stop for s in slices)]
    if edges[-1] == len(x) and edges[:-1] == [s.start for s in slices]:
        return x.split([s.stop - s.start for s in slices])
    return [x[s] for s in slices]
