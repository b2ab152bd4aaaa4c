"""A short forward for the Llama-shaped families, which most targets are.

transformers' layers spend about half of a one-token step in Python and in small operators. For
layers of exactly the shape below the same function is written out here in as few operators as it
takes:

    x += O(attention(rope(norm_q(Q n1(x))), rope(norm_k(K n1(x))), V n1(x)))
    x += W_down(silu(W_gate n2(x)) * W_up n2(x))

Query, key and value share one product, gate and up another. Rows of Q and K are stored in an order
that makes the two halves of a rotated pair adjacent, so that RoPE is one complex multiplication;
attention scores are sums over those rows, so the order does not matter to them.

Anything else (other activations, post-norms, experts, scaled residuals) takes the generic path
through the model's own code (targets.hf), and `tests/targets` holds the two equal.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.nn.attention import ragged_attention
from dspark.nn.attention_plan import AttentionPlan
from dspark.nn.kv_cache import KVStore
from dspark.nn.linear import PackedLinear, RowMode, WeightKind
from dspark.nn.row_exact import by_rows, for_rows

FAST_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


@dataclass(slots=True)
class _Layer:
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: Tensor
    post_norm: Tensor
    query_key_norm: Tensor | None
    """[H + KV, head_dim] weights of the per-head norms (Qwen3), in rotated-pair order."""
    window: int | None


class FastDecoder(nn.Module):
    """The decoder stack of a Llama-shaped model: embeddings in, final-normed hidden states out."""

    def __init__(self, decoder: Any, kind: WeightKind, mode: RowMode) -> None:
        super().__init__()
        config = decoder.config
        self.mode = mode
        self.embedding: nn.Embedding = decoder.embed_tokens
        self.rotary: nn.Module = decoder.rotary_emb
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = decoder.layers[0].self_attn.head_dim
        self.scale: float = decoder.layers[0].self_attn.scaling
        self.intermediate: int = config.intermediate_size
        self.eps = torch.tensor(config.rms_norm_eps)
        self.final_norm = decoder.norm.weight.detach().float()
        self.layers = [self._pack(layer, kind, mode) for layer in decoder.layers]
        self._linears = nn.ModuleList(
            linear
            for layer in self.layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )  # so that module traversal (exactness, drift) finds them

    @classmethod
    def fits(cls, decoder: Any) -> bool:
        """Whether every layer has exactly the shape this path computes."""
        config = decoder.config
        return (
            all(type(layer).__name__ in FAST_LAYERS for layer in decoder.layers)
            and getattr(config, "hidden_act", None) == "silu"
            and all(_plain_linears(layer) for layer in decoder.layers)
        )

    def forward(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        plan: AttentionPlan,
        store: KVStore,
        taps: dict[int, Tensor],
    ) -> Tensor:
        """Final-normed hidden states [N, D]; fills `taps` at the layer ids it has as keys."""
        x = self.embedding(tokens_N)
        if -1 in taps:
            taps[-1] = x
        rotation = self._rotation(x, positions_N)
        rows, groups = x.shape[0], self.heads + self.kv_heads
        split = groups * self.head_dim
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv.rows(_rms_norm(x, layer.input_norm, self.eps))
            query_key = qkv[:, :split].view(rows, groups, self.head_dim)
            if layer.query_key_norm is not None:
                query_key = _rms_norm(query_key, layer.query_key_norm, self.eps)
            self._rotate(query_key, rotation)
            values = qkv[:, split:].view(rows, self.kv_heads, -1)
            store.write(index, plan.batch.slots_N, query_key[:, self.heads :], values)
            attended = ragged_attention(
                query_key[:, : self.heads],
                plan,
                store,
                index,
                scale=self.scale,
                window=layer.window,
            )
            x = x + layer.output.rows(attended.reshape(rows, -1))
            gate_up = layer.gate_up.native_rows(_rms_norm(x, layer.post_norm, self.eps))
            gate, up = gate_up.split(self.intermediate, dim=1)
            x = x + layer.down.rows(self._silu(gate).mul_(up))
            if index in taps:
                taps[index] = x
        return _rms_norm(x, self.final_norm, self.eps)

    def _silu(self, x: Tensor) -> Tensor:
        return by_rows(F.silu, x) if self.mode.exact else F.silu(x)

    def _rotate(self, x_NHD: Tensor, rotation: Tensor) -> None:
        """In place."""
        pairs = torch.view_as_complex(x_NHD.view(*x_NHD.shape[:2], -1, 2))
        if self.mode.exact:
            for_rows(Tensor.mul_, pairs, rotation)
        else:
            pairs.mul_(rotation)

    def _rotation(self, x: Tensor, positions_N: Tensor) -> Tensor:
        """Unit complex numbers [N, 1, head_dim / 2] (scaled where the model's RoPE scales)."""
        cos, sin = self.rotary(x[None], positions_N[None])
        half = self.head_dim // 2
        return torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())[:, None]

    def _pack(self, layer: Any, kind: WeightKind, mode: RowMode) -> _Layer:
        attention, mlp, layer_config = layer.self_attn, layer.mlp, layer.self_attn.config
        order = _pair_order(self.head_dim)
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        weights = [
            _reorder(attention.q_proj.weight, order),
            _reorder(attention.k_proj.weight, order),
            attention.v_proj.weight,
        ]
        bias = None
        if any(linear.bias is not None for linear in qkv):
            bias = torch.cat(
                [
                    _reorder(attention.q_proj.bias, order),
                    _reorder(attention.k_proj.bias, order),
                    attention.v_proj.bias,
                ]
            )
        norms = None
        if hasattr(attention, "q_norm"):
            norms = torch.cat(
                [
                    attention.q_norm.weight.detach().float()[order].expand(self.heads, -1),
                    attention.k_norm.weight.detach().float()[order].expand(self.kv_heads, -1),
                ]
            )
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        gate_up_bias = None
        if mlp.gate_proj.bias is not None:
            gate_up_bias = torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias])
        return _Layer(
            qkv=PackedLinear(torch.cat(weights), bias, kind, mode),
            output=PackedLinear(attention.o_proj.weight, attention.o_proj.bias, kind, mode),
            gate_up=PackedLinear(gate_up, gate_up_bias, kind, mode),
            down=PackedLinear(mlp.down_proj.weight, mlp.down_proj.bias, kind, mode),
            input_norm=layer.input_layernorm.weight.detach().float(),
            post_norm=layer.post_attention_layernorm.weight.detach().float(),
            query_key_norm=norms,
            # Mistral's attention reads the window from its configuration instead.
            window=getattr(
                attention, "sliding_window", getattr(layer_config, "sliding_window", None)
            ),
        )


def _rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    # Written out: torch's rms_norm is a longer chain of operators on CPU.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1])
    return torch.mul(x, mean_square.rsqrt_()).mul_(weight)


def _pair_order(head_dim: int) -> Tensor:
    """Indices that bring element i and i + head_dim / 2 (one rotated pair) side by side."""
    return torch.arange(head_dim).view(2, -1).T.reshape(-1)


def _reorder(weight: Tensor, order: Tensor) -> Tensor:
    """Applies `order` inside every head of a projection's output rows (or of its bias)."""
    heads = weight.view(-1, len(order), *weight.shape[1:])
    return heads[:, order].reshape(weight.shape)


def _plain_linears(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    names = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(type(linear) is nn.Linear for linear in names)
