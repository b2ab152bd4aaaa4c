"""The drafter as the engine uses it: fused weights, context K/V in pages, sampling in order."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.core.sampling import SamplingParams
from dspark.drafters.backbone import DraftLayer
from dspark.drafters.dspark import DSparkModel
from dspark.drafters.fused import (
    FusedLayer,
    Linear,
    LinearFactory,
    ServedMarkovHead,
    plain_linear,
    weight_of,
)
from dspark.drafters.proposals import ProposalHead, draw
from dspark.nn.attention import AttentionPlan, ragged_attention
from dspark.nn.binding import embed
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.layers import rms_norm, rotary_angles, rotate
from dspark.nn.pages import PageTable
from dspark.nn.sampling import SamplingRows
from dspark.nn.seams import Binding, DraftAdjust, DraftBlock, DraftNoise, RaggedBatch


class DSparkDrafter:
    """A trained `DSparkModel` behind the `Drafter` seam.

    Weights are copied, fused and handed to `linear_factory`; later changes of the model do not
    show. `candidates` tokens per slot may be proposed (0: all), with the exact probabilities of
    that restricted distribution. `draft_token_ids` restricts proposals to a draft vocabulary and
    makes the LM head as much cheaper. Either costs accepted length, never correctness.
    """

    def __init__(
        self,
        model: DSparkModel,
        binding: Binding,
        *,
        candidates: int = 64,
        draft_token_ids: Tensor | None = None,
        linear_factory: LinearFactory = plain_linear,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config = model.config
        self.config = config
        self.block_size = config.block_size
        self.tap_layers = config.target_layer_ids
        self.kv_shape = KVShape.uniform(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        )
        self._binding = binding
        self._clock = clock

        def packed(*weights: Tensor) -> Linear:
            return linear_factory(torch.cat([weight_of(weight) for weight in weights]))

        layers: list[DraftLayer] = list(model.layers)  # type: ignore[arg-type]
        self._fc = packed(model.fc.weight)
        self._hidden_norm = weight_of(model.hidden_norm.weight)
        attentions = [layer.self_attn for layer in layers]
        self._context = packed(*(w for a in attentions for w in (a.k_proj.weight, a.v_proj.weight)))
        norms_Ld = torch.stack([weight_of(a.k_norm.weight) for a in attentions])
        self._context_norm_L1d = norms_Ld[:, None]
        self._layers = [FusedLayer(layer, packed) for layer in layers]
        self._norm = weight_of(model.norm.weight)

        self._proposals = ProposalHead(binding, candidates, draft_token_ids, linear_factory)
        head_model, confidence = model.markov_head, model.confidence_head
        self._markov = (
            ServedMarkovHead(head_model, self._proposals.token_ids) if head_model else None
        )
        self._confidence = (
            (weight_of(confidence.proj.weight), weight_of(confidence.proj.bias))
            if confidence
            else None
        )

    def shortened(self, block_size: int) -> Self:
        """See `Drafter.shortened`."""
        shorter = copy(self)
        shorter.block_size = min(block_size, self.block_size)
        return shorter

    @torch.inference_mode()
    def extend_context(
        self,
        taps_NF: Tensor,
        next_tokens_N: Tensor,
        positions_N: Tensor,
        slots_N: Tensor,
        store: KVStore,
    ) -> None:
        """Context K/V of every layer, from `hidden_norm(fc(taps))` (paper, equations 2 and 3)."""
        config = self.config
        feature_ND = rms_norm(self._fc(taps_NF), self._hidden_norm, config.rms_norm_eps)
        kv = self._context(feature_ND).view(
            len(taps_NF), config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim
        )
        angles = rotary_angles(positions_N[:, None], config.head_dim, config.rope_theta)
        keys = rotate(
            rms_norm(kv[:, :, 0], None, config.rms_norm_eps) * self._context_norm_L1d, angles
        )
        for layer in range(config.num_hidden_layers):
            store.write(layer, slots_N, keys[:, layer], kv[:, layer, 1])

    @torch.inference_mode()
    def draft(
        self,
        anchors_R: Tensor,
        anchor_positions_R: Tensor,
        tables: Sequence[PageTable],
        store: KVStore,
        *,
        texts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        noise: DraftNoise,
        adjust: DraftAdjust | None = None,
    ) -> DraftBlock:
        """One backbone pass over R blocks, then K tokens left to right; see `Drafter.draft`."""
        hidden_RKD = self.block_hidden(anchors_R, anchor_positions_R, tables, store)
        R, K, D = hidden_RKD.shape
        base_MC, columns_MC, ids_MC = self._proposals(hidden_RKD.view(R * K, D))
        base_RKC, ids_RKC = base_MC.view(R, K, -1), ids_MC.view(R, K, -1)
        columns_RKC = None if columns_MC is None else columns_MC.view(R, K, -1)

        head_started = self._clock()
        rows = SamplingRows.of(sampling, device=base_MC.device)
        bias = self._markov.block(hidden_RKD, columns_RKC) if self._markov else None
        probs_RKC = torch.empty(ids_RKC.shape, dtype=torch.float64, device=base_MC.device)
        tokens = torch.empty(R, 1 + K, dtype=torch.int64, device=base_MC.device)
        tokens[:, 0] = anchors_R
        for slot in range(K):
            logits_RC = base_RKC[:, slot]
            if bias is not None:
                logits_RC = logits_RC + bias(slot, tokens[:, slot])
            probs_RKC[:, slot], tokens[:, slot + 1] = draw(
                logits_RC, ids_RKC[:, slot], rows, noise, tokens[:, 1 : slot + 1], adjust
            )
        head_seconds = self._clock() - head_started
        return DraftBlock(
            tokens_RK=tokens[:, 1:],
            candidates_RKC=ids_RKC,
            probs_RKC=probs_RKC,
            confidence_RK=self._confidence_logits(hidden_RKD, tokens[:, :K]),
            head_seconds=head_seconds,
        )

    @torch.inference_mode()
    def block_hidden(
        self,
        anchors_R: Tensor,
        anchor_positions_R: Tensor,
        tables: Sequence[PageTable],
        store: KVStore,
    ) -> Tensor:
        """Hidden states [R, K, D] after the final norm, of the blocks after R anchors."""
        config, K = self.config, self.block_size
        R = len(tables)
        tokens_RK = anchors_R[:, None].repeat(1, K)
        tokens_RK[:, 1:] = config.mask_token_id
        positions = (
            anchor_positions_R[:, None] + torch.arange(K, device=anchors_R.device)
        ).flatten()
        angles = rotary_angles(positions, config.head_dim, config.rope_theta)
        plan = AttentionPlan.build(_blocks(tokens_RK, anchor_positions_R.tolist(), tables))
        x = embed(self._binding, tokens_RK.flatten())
        for index, layer in enumerate(self._layers):
            normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
            q, k, v = layer.heads(normed, angles, config.rms_norm_eps)
            # The block's own keys and values lie behind the context until the text has grown there.
            store.write(index, plan.batch.slots_N, k, v)
            attended = ragged_attention(q, plan, store, index, scale=config.head_dim**-0.5)
            x = layer.finish(x, attended.reshape(R * K, -1), config.rms_norm_eps)
        return rms_norm(x, self._norm, config.rms_norm_eps).view(R, K, -1)

    def _confidence_logits(self, hidden_RKD: Tensor, previous_RK: Tensor) -> Tensor | None:
        if self._confidence is None:
            return None
        if self.config.has_markov_confidence:
            assert self._markov is not None
            hidden_RKD = torch.cat([hidden_RKD, self._markov.w1_Vr[previous_RK]], -1)
        return F.linear(hidden_RKD, *self._confidence)[..., 0]


def _blocks(tokens_RK: Tensor, lengths: Sequence[int], tables: Sequence[PageTable]) -> RaggedBatch:
    """R blocks as rows of one step. Every row stands at its block's last position: causal attention
    then sees the whole block."""
    R, K = tokens_RK.shape
    ends = [length + K for length in lengths]
    device = tokens_RK.device
    return RaggedBatch(
        tokens_N=tokens_RK.flatten(),
        positions_N=torch.tensor(ends, device=device).sub_(1).repeat_interleave(K),
        requests_N=torch.arange(R, device=device).repeat_interleave(K),
        slots_N=torch.cat([t.slots(e - K, e) for t, e in zip(tables, ends, strict=True)]).to(
            device
        ),
        starts=tuple(range(0, (R + 1) * K, K)),
        context_lengths=tuple(ends),
        tables=tuple(tables),
        exact=False,
    )
