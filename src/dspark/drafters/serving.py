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
from dspark.drafters.proposals import Drawn, ProposalHead, Proposals, draw, entropy
from dspark.nn.attention import ragged_attention
from dspark.nn.attention_plan import AttentionPlan
from dspark.nn.binding import embed
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.layers import rms_norm, rotary_angles, rotate
from dspark.nn.pages import PageTable
from dspark.nn.sampling import SamplingRows
from dspark.nn.seams import Binding, DraftAdjust, DraftBlock, DraftNoise, RaggedBatch

DrawSlot = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(slot, logits [R, C], tokens drafted before it [R, slot]) -> (probabilities [R, C], tokens
[R])."""


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
        candidates: int = 0,
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
        proposals = self._propose(anchors_R, anchor_positions_R, tables, store)
        head_started = self._clock()
        drawn = self._sample(anchors_R, proposals, sampling, noise, adjust)
        return DraftBlock(
            tokens_RK=drawn.tokens_RK,
            candidates_RKC=proposals.ids_RKC,
            probs_RKC=drawn.probs_RKC,
            confidence_RK=drawn.confidence_RK,
            entropy_RK=drawn.entropy_RK,
            head_seconds=self._clock() - head_started,
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
        plan = AttentionPlan.build(
            _blocks(anchors_R, anchor_positions_R.tolist(), tables, self.block_size)
        )
        scale = self.config.head_dim**-0.5

        def attend(query_NHd: Tensor, layer: int) -> Tensor:
            return ragged_attention(query_NHd, plan, store, layer, scale=scale)

        return self._backbone(anchors_R, anchor_positions_R, plan.batch.slots_N, store, attend)

    def _propose(
        self,
        anchors_R: Tensor,
        anchor_positions_R: Tensor,
        tables: Sequence[PageTable],
        store: KVStore,
    ) -> Proposals:
        return self._candidates(self.block_hidden(anchors_R, anchor_positions_R, tables, store))

    def _sample(
        self,
        anchors_R: Tensor,
        proposals: Proposals,
        sampling: Sequence[SamplingParams],
        noise: DraftNoise,
        adjust: DraftAdjust | None,
    ) -> Drawn:
        rows = SamplingRows.of(sampling, device=anchors_R.device)

        def draw_slot(slot: int, logits_RC: Tensor, drafted_Rk: Tensor) -> tuple[Tensor, Tensor]:
            return draw(logits_RC, proposals.ids_RKC[:, slot], rows, noise, drafted_Rk, adjust)

        return self._left_to_right(anchors_R, proposals, draw_slot)

    # What follows looks at no value on the host, so that it can be captured (drafters.captured).

    def _backbone(
        self,
        anchors_R: Tensor,
        anchor_positions_R: Tensor,
        slots_N: Tensor,
        store: KVStore,
        attend: Callable[[Tensor, int], Tensor],
    ) -> Tensor:
        """Hidden states [R, K, D]; `attend` takes a layer's queries [R * K, H, d] and its index."""
        config, R, K = self.config, len(anchors_R), self.block_size
        masks = anchors_R.new_full((R, K - 1), config.mask_token_id)
        tokens_RK = torch.cat([anchors_R[:, None], masks], 1)
        positions_RK = anchor_positions_R[:, None] + torch.arange(K, device=anchors_R.device)
        angles = rotary_angles(positions_RK.flatten(), config.head_dim, config.rope_theta)
        x = embed(self._binding, tokens_RK.flatten())
        for index, layer in enumerate(self._layers):
            normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
            q, k, v = layer.heads(normed, angles, config.rms_norm_eps)
            # The block's own keys and values lie behind the context until the text has grown there.
            store.write(index, slots_N, k, v)
            attended = attend(q, index)
            x = layer.finish(x, attended.reshape(R * K, -1), config.rms_norm_eps)
        return rms_norm(x, self._norm, config.rms_norm_eps).view(R, K, -1)

    def _candidates(self, hidden_RKD: Tensor) -> Proposals:
        R, K, D = hidden_RKD.shape
        base_MC, columns_MC, ids_MC = self._proposals(hidden_RKD.view(R * K, D))
        return Proposals(
            hidden_RKD,
            base_MC.view(R, K, -1),
            ids_MC.view(R, K, -1),
            None if columns_MC is None else columns_MC.view(R, K, -1),
        )

    def _left_to_right(self, anchors_R: Tensor, proposals: Proposals, draw_slot: DrawSlot) -> Drawn:
        hidden_RKD, base_RKC, ids_RKC, columns_RKC = proposals
        R, K, _ = hidden_RKD.shape
        bias = self._markov.block(hidden_RKD, columns_RKC) if self._markov else None
        probs_RKC = torch.empty(ids_RKC.shape, dtype=torch.float64, device=base_RKC.device)
        tokens = torch.empty(R, 1 + K, dtype=torch.int64, device=base_RKC.device)
        tokens[:, 0] = anchors_R
        logits_RKC = base_RKC if bias is None else torch.empty_like(base_RKC)
        for slot in range(K):
            if bias is not None:
                logits_RKC[:, slot] = base_RKC[:, slot] + bias(slot, tokens[:, slot])
            probs_RKC[:, slot], tokens[:, slot + 1] = draw_slot(
                slot, logits_RKC[:, slot], tokens[:, 1 : slot + 1]
            )
        if self._confidence is None:
            return Drawn(tokens[:, 1:], probs_RKC)
        confidence_RK = self._confidence_logits(hidden_RKD, tokens[:, :K])
        return Drawn(tokens[:, 1:], probs_RKC, confidence_RK, entropy(logits_RKC))

    def _confidence_logits(self, hidden_RKD: Tensor, previous_RK: Tensor) -> Tensor:
        assert self._confidence is not None
        if self.config.has_markov_confidence:
            assert self._markov is not None
            hidden_RKD = torch.cat([hidden_RKD, self._markov.w1_Vr[previous_RK]], -1)
        return F.linear(hidden_RKD, *self._confidence)[..., 0]


def _blocks(
    anchors_R: Tensor, lengths: Sequence[int], tables: Sequence[PageTable], K: int
) -> RaggedBatch:
    """R blocks as rows of one step, for attention alone. Every row stands at its block's last
    position: causal attention then sees the whole block."""
    R = len(tables)
    ends = [length + K for length in lengths]
    device = anchors_R.device
    return RaggedBatch(
        tokens_N=anchors_R.repeat_interleave(K),
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
