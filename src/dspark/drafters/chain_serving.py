"""Eagle3 and MTP as the engine uses them: fused weights, rows of the text in pages."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams
from dspark.drafters.chain import ChainModel, Eagle3Model, MtpModel
from dspark.drafters.fused import FusedLayer, Linear, LinearFactory, plain_linear, weight_of
from dspark.drafters.proposals import ProposalHead, draw
from dspark.nn.binding import embed
from dspark.nn.block_attention import block_attention
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.layers import rms_norm, rotary_angles
from dspark.nn.pages import PageTable
from dspark.nn.sampling import SamplingRows
from dspark.nn.seams import Binding, DraftAdjust, DraftBlock, DraftNoise

Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(states, embedded tokens) -> (residual, attention's input), as `ChainModel.join`."""


class ChainDrafter:
    """A trained `ChainModel` behind the `Drafter` seam; options as `DSparkDrafter`'s.

    Beside the keys and values of its layer it keeps each position's state, in the keys of a second
    one: a block starts from that of the position before its anchor.
    """

    def __init__(
        self,
        model: ChainModel,
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
        groups = config.num_key_value_heads
        self.kv_shape = KVShape(
            (groups, 1), (config.head_dim, config.hidden_size), (config.head_dim, 0)
        )
        self._binding = binding
        self._clock = clock

        def packed(*weights: Tensor) -> Linear:
            return linear_factory(torch.cat([weight_of(weight) for weight in weights]))

        self._layer = FusedLayer(model.layer, packed)
        self._fuse, self._join = _entrance(model, packed)
        self._norm = weight_of(model.norm.weight)
        self._proposals = ProposalHead(binding, candidates, draft_token_ids, linear_factory)

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
        """Rows of committed positions: each feature joined with the token that follows it."""
        states_ND = self._fuse(taps_NF)
        _, inner_NW = self._join(states_ND, embed(self._binding, next_tokens_N))
        _, keys, values = self._layer.heads(
            inner_NW, self._angles(positions_N), self.config.rms_norm_eps
        )
        store.write(0, slots_N, keys, values)
        nothing = states_ND.new_empty(len(states_ND), 1, 0)
        store.write(1, slots_N, states_ND[:, None], nothing)

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
        """K passes of one row a request, each over the rows before it; see `Drafter.draft`."""
        eps, K, R = self.config.rms_norm_eps, self.block_size, len(tables)
        first_R = anchor_positions_R - 1  # a prompt has a token, so no anchor stands at 0
        firsts = first_R.tolist()
        context = [store.read(0, tables[r], firsts[r], firsts[r]) for r in range(R)]
        context = [(keys.float(), values.float()) for keys, values in context]
        state_slots = torch.cat([tables[r].slots(firsts[r], firsts[r] + 1) for r in range(R)])
        states_RD = store.keys[1][state_slots.to(anchors_R.device)][:, 0].float()
        rows = SamplingRows.of(sampling, device=states_RD.device)
        tokens_R = anchors_R
        keys: list[Tensor] = []
        values: list[Tensor] = []
        drawn: list[Tensor] = []
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        head_seconds = 0.0
        for slot in range(K):
            residual_RD, inner_RW = self._join(states_RD, embed(self._binding, tokens_R))
            q, k, v = self._layer.heads(inner_RW, self._angles(first_R + slot), eps)
            keys.append(k)
            values.append(v)
            own_k, own_v = torch.stack(keys, 1), torch.stack(values, 1)
            attended = torch.cat(
                [
                    block_attention(
                        q[r : r + 1, None],
                        context[r][0],
                        context[r][1],
                        own_k[r : r + 1],
                        own_v[r : r + 1],
                    )[0]
                    for r in range(R)
                ]
            )
            states_RD = self._layer.finish(residual_RD, attended, eps)
            logits_RC, _, ids_RC = self._proposals(rms_norm(states_RD, self._norm, eps))
            started = self._clock()
            drafted_Rk = torch.stack([anchors_R, *drawn], 1)[:, 1:]
            probs_RC, tokens_R = draw(logits_RC, ids_RC, rows, noise, drafted_Rk, adjust)
            head_seconds += self._clock() - started
            drawn.append(tokens_R)
            ids.append(ids_RC)
            probs.append(probs_RC)
        return DraftBlock(
            tokens_RK=torch.stack(drawn, 1),
            candidates_RKC=torch.stack(ids, 1),
            probs_RKC=torch.stack(probs, 1),
            confidence_RK=None,
            head_seconds=head_seconds,
        )

    def _angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(positions_N, self.config.head_dim, self.config.rope_theta)


def _entrance(model: ChainModel, packed: Callable[..., Linear]) -> tuple[Linear, Join]:
    """`fuse` and `join` of a model, with its weights as they are now."""
    eps = model.config.rms_norm_eps
    input_norm = weight_of(model.layer.input_layernorm.weight)
    if isinstance(model, Eagle3Model):
        hidden_norm = weight_of(model.layer.hidden_norm.weight)  # type: ignore[union-attr,arg-type]

        def join_eagle3(state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
            parts = rms_norm(embedded, input_norm, eps), rms_norm(state, hidden_norm, eps)
            return state, torch.cat(parts, -1)

        return packed(model.fc.weight), join_eagle3

    assert isinstance(model, MtpModel), type(model)
    e_norm, h_norm = weight_of(model.enorm.weight), weight_of(model.hnorm.weight)
    eh_proj = packed(model.eh_proj.weight)

    def join_mtp(state: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        parts = rms_norm(embedded, e_norm, eps), rms_norm(state, h_norm, eps)
        joined = eh_proj(torch.cat(parts, -1))
        return joined, rms_norm(joined, input_norm, eps)

    return lambda features: features, join_mtp
