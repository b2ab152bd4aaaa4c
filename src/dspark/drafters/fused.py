"""Weights of a draft model, fused and packed for inference."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.drafters.backbone import DraftLayer
from dspark.drafters.chain import ChainLayer
from dspark.drafters.heads.markov import MarkovHead
from dspark.nn.layers import rms_norm, rotate

Linear = Callable[[Tensor], Tensor]
LinearFactory = Callable[[Tensor], Linear]
"""Makes x -> x W^T ([rows, in] -> [rows, out], float32) from a float32 weight [out, in]."""


def plain_linear(weight: Tensor) -> Linear:
    return lambda x: F.linear(x, weight)


def bf16_linear(weight: Tensor) -> Linear:
    """The product in bfloat16, for devices that multiply it faster."""
    weight = weight.bfloat16()
    return lambda x: F.linear(x.bfloat16(), weight).float()


def weight_of(parameter: Tensor) -> Tensor:
    """The values of a parameter, float32 and without a graph."""
    return parameter.detach().float()


class FusedLayer:
    """A draft layer with one product for q, k, v and one for gate and up.

    What enters its attention is the caller's, because drafters differ in it.
    """

    def __init__(self, layer: DraftLayer | ChainLayer, packed: Callable[..., Linear]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim = attention.head_dim
        self.num_q = attention.q_proj.out_features // self.head_dim
        self.num_kv = attention.k_proj.out_features // self.head_dim
        self.qkv = packed(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self.o = packed(attention.o_proj.weight)
        self.gate_up = packed(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.down = packed(mlp.down_proj.weight)
        self.input_norm = weight_of(layer.input_layernorm.weight)
        self.post_norm = weight_of(layer.post_attention_layernorm.weight)
        self.head_norm = torch.cat(
            [
                weight_of(attention.q_norm.weight).expand(self.num_q, -1),
                weight_of(attention.k_norm.weight).expand(self.num_kv, -1),
            ]
        )

    def heads(
        self, x: Tensor, angles: tuple[Tensor, Tensor], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [M, H, d], keys and values [M, G, d] of attention inputs x [M, width]."""
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        normed = self.num_q + self.num_kv
        qk = rotate(rms_norm(qkv[:, :normed], None, eps) * self.head_norm, angles)
        return qk[:, : self.num_q], qk[:, self.num_q :], qkv[:, normed:]

    def finish(self, x: Tensor, attended: Tensor, eps: float) -> Tensor:
        """Output projection, residual, MLP."""
        x = x + self.o(attended)
        gate, up = self.gate_up(rms_norm(x, self.post_norm, eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class ServedMarkovHead:
    """A sequential head over the tokens that may be proposed."""

    def __init__(self, head: MarkovHead, token_ids: Tensor) -> None:
        self.head = head
        self.w1_Vr = weight_of(head.markov_w1.weight)
        self.w2_Cr = weight_of(head.markov_w2.weight)[token_ids]

    def block(
        self, hidden_RKD: Tensor, columns_RKC: Tensor | None
    ) -> Callable[[int, Tensor], Tensor]:
        """(slot, previous tokens [R]) -> biases [R, C] of that slot's candidates.

        To be called for slots 0, 1, ... in order: what a head carries from slot to slot lives in
        the closure. The candidates of all slots are gathered at once, before the first token is
        known.
        """
        w2_RKCr = None if columns_RKC is None else self.w2_Cr[columns_RKC]
        state: Tensor | None = None
        following = 0

        def bias(slot: int, previous_R: Tensor) -> Tensor:
            nonlocal state, following
            assert slot == following, (slot, following)
            following += 1
            latent_Rr, state = self.head.step(state, self.w1_Vr[previous_R], hidden_RKD[:, slot])
            if w2_RKCr is None:
                return F.linear(latent_Rr, self.w2_Cr)
            return torch.bmm(w2_RKCr[:, slot], latent_Rr[..., None])[..., 0]

        return bias
