"""Drafters that draft token by token with one layer: Eagle3 and MTP.

A row joins a state with the embedding of the token one position later. The states of committed
positions come from the target's features; so a row's key and value need no attention, and rows of
the text so far are context, as a DSpark drafter's are. The block after an anchor at position a is a
chain of rows: slot 0 is the row of position a - 1 (the feature before the anchor, and the anchor),
slot k has the state that slot k - 1 left and the token drawn there. A slot attends to the rows of
the text and to its own chain so far.

Training runs the same chains from many anchors at once, with known tokens: Eagle3's training-time
test (its queries over all positions are all anchors), where DeepSpec's mask has the text's rows
causally and each later step's row of the same chain only.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from dspark.drafters.backbone import Projections, cut, group_by_sequence
from dspark.drafters.config import DraftConfig, Eagle3Config, MtpConfig
from dspark.drafters.model import Blocks, DraftModel, Slots
from dspark.nn.binding import embed
from dspark.nn.block_attention import block_attention
from dspark.nn.layers import RMSNorm, SwiGLU, rotary_angles
from dspark.nn.seams import Binding


class ChainLayer(nn.Module):
    """A Qwen3 decoder layer, but for what enters its attention."""

    def __init__(self, config: DraftConfig, width: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Projections(config, width)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)


class ChainModel(DraftModel):
    """Subclasses say what a state is and how it is joined with a token."""

    layers: nn.ModuleList
    norm: RMSNorm

    @property
    def layer(self) -> ChainLayer:
        return self.layers[0]  # type: ignore[return-value]

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """States [..., D] of tapped features [..., F]."""

    @abstractmethod
    def join(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """(residual [..., D], attention's input [..., width]) of states and embeddings [..., D]."""

    def forward_slots(self, binding: Binding, blocks: Blocks) -> Slots:
        config, attention = self.config, self.layer.self_attn

        def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
            return rotary_angles(positions, config.head_dim, config.rope_theta)

        states_ND = self.fuse(blocks.context_NF.to(self.norm.weight.dtype))
        _, inner_NW = self.join(states_ND, embed(binding, blocks.context_next_N))
        context_k, context_v = attention.keys_values(inner_NW, angles(blocks.context_positions_N))

        # A chain brings its own first row: what it sees of the text ends before that.
        first_A = blocks.anchor_positions_A - 1
        visible_AN = blocks.visible_AN & (blocks.context_positions_N < first_A[:, None])
        anchors, rows, visible = zip(*group_by_sequence(visible_AN), strict=True)
        # The anchor at position 0 has no feature before it; serving never drafts there.
        row_A = (blocks.visible_AN.to(torch.int8).argmax(1) + first_A).clamp_min(0)
        state_AD = states_ND[row_A] * (first_A >= 0)[:, None]

        hidden, keys, values = [], [], []
        for k in range(config.block_size):
            at = angles(first_A + k)
            residual_AD, inner_AW = self.join(state_AD, embed(binding, blocks.previous_AK[:, k]))
            key_AGd, value_AGd = attention.keys_values(inner_AW, at)
            keys.append(key_AGd)
            values.append(value_AGd)
            pieces = zip(
                cut(attention.queries(inner_AW, at)[:, None], anchors),
                cut(context_k, rows), cut(context_v, rows),
                cut(torch.stack(keys, 1), anchors), cut(torch.stack(values, 1), anchors),
                visible, strict=True,
            )  # fmt: skip
            attended_AW = torch.cat([block_attention(*piece)[:, 0] for piece in pieces])
            x_AD = residual_AD + attention.o_proj(attended_AW)
            state_AD = x_AD + self.layer.mlp(self.layer.post_attention_layernorm(x_AD))
            hidden.append(self.norm(state_AD))
        return Slots(torch.stack(hidden, 1), None, None, None)


class Eagle3Layer(ChainLayer):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Model(ChainModel):
    """Eagle3 as DeepSpec builds it: q/k norms, the target's frozen embedding and LM head.

    Attention reads [norm(token) ; norm(state)]; the residual is the state itself, not its norm.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def join(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        layer: Eagle3Layer = self.layer  # type: ignore[assignment]
        return state, torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], -1)


class MtpModel(ChainModel):
    """One multi-token-prediction module of DeepSeek-V3, with Qwen3's layer and full attention.

    Its state is the target's last hidden state, before the final norm.
    """

    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([ChainLayer(config, config.hidden_size)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def join(self, state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], -1))
        return joined, self.layer.input_layernorm(joined)
