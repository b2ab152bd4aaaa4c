"""DSpark's draft in two captured graphs: the backbone up to the candidates, then all of the
sequential loop.

Between the two the round's noise is drawn, on the host as ever: a draw may depend on which tokens
are candidates and never on one that was drafted. So both forms are given the same numbers.

Graphs are made the first time a size is met: requests and pages rounded up to powers of two
(`nn.graphs.bucket`).
"""

from collections.abc import Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dspark.core.sampling import SamplingParams
from dspark.drafters.dspark import DSparkModel
from dspark.drafters.proposals import Drawn, Proposals
from dspark.drafters.serving import DSparkDrafter
from dspark.nn.graphs import Capture, Graphed, bucket
from dspark.nn.kv_cache import KVStore
from dspark.nn.padded_attention import (
    padded_attention,
    padded_mask,
    padded_pages,
    padded_size,
    page_slots,
    scratch_page,
)
from dspark.nn.padded_sampling import probs_from_rows, sampling_rows, truncates_any
from dspark.nn.pages import PageTable
from dspark.nn.sampling import race
from dspark.nn.seams import Binding, DraftAdjust, DraftNoise

MOST_KEYS = 1 << 19
"""Positions of all requests together, as padded, above which the backbone runs eagerly: it would
copy their keys and values, 2 GiB a layer in bf16 with 8 heads of 128. A bound on memory: which
form is faster, and up to where, has not been measured."""

Tensors = tuple[Tensor, ...]


class CapturedDrafter(DSparkDrafter):
    """A `DSparkDrafter` whose draft is captured. It runs eagerly, as that one does,

    * the loop of a round in which a request needs the host at every slot (`adjust`: a grammar,
      bias, penalties, bans, min_tokens),
    * the backbone of a round with more than MOST_KEYS positions to copy,
    * `extend_context`, whose rows are as many as were accepted.
    """

    def __init__(
        self, model: DSparkModel, binding: Binding, *, capture: Capture, **options: Any
    ) -> None:
        """`options` are `DSparkDrafter`'s; its `linear_factory` must be one that `capture` can
        hold."""
        super().__init__(model, binding, **options)
        self._capture = capture
        self._forget()

    def shortened(self, block_size: int) -> Self:
        """See `Drafter.shortened`. It has graphs of its own."""
        shorter = super().shortened(block_size)
        shorter._forget()
        return shorter

    def _forget(self) -> None:
        # A backbone graph is bound to the memory of a store, and goes with it.
        self._backbones: WeakKeyDictionary[KVStore, dict[tuple[int, int, int], Graphed]]
        self._backbones = WeakKeyDictionary()
        self._loops: dict[tuple[int, bool], Graphed] = {}

    def captures(self, tables: Sequence[PageTable]) -> bool:
        """Whether the backbone of a round of these requests is captured."""
        requests, pages = padded_size(tables)
        return requests * pages * tables[0].page_size <= MOST_KEYS

    def _propose(
        self,
        anchors_R: Tensor,
        anchor_positions_R: Tensor,
        tables: Sequence[PageTable],
        store: KVStore,
    ) -> Proposals:
        if not self.captures(tables):
            return super()._propose(anchors_R, anchor_positions_R, tables, store)
        requests, pages = padded_size(tables)
        page_size = tables[0].page_size
        graphs = self._backbones.setdefault(store, {})
        key = requests, pages, page_size
        if key not in graphs:
            graphs[key] = self._backbone_graph(*key, store)
        hidden_RKD, base_RKC, ids_RKC, *columns = graphs[key](
            anchors_R, anchor_positions_R, padded_pages(tables, pages)
        )
        return Proposals(hidden_RKD, base_RKC, ids_RKC, columns[0] if columns else None)

    def _sample(
        self,
        anchors_R: Tensor,
        proposals: Proposals,
        sampling: Sequence[SamplingParams],
        noise: DraftNoise,
        adjust: DraftAdjust | None,
    ) -> Drawn:
        if adjust is not None:
            return super()._sample(anchors_R, proposals, sampling, noise, adjust)
        slots = range(self.block_size)
        noise_RKC = torch.stack([noise(slot, proposals.ids_RKC[:, slot]) for slot in slots], 1)
        values = [anchors_R, noise_RKC, sampling_rows(sampling), *_present(proposals)]
        key = bucket(len(sampling)), truncates_any(sampling)
        if key not in self._loops:
            self._loops[key] = self._loop_graph(*key, values)
        return Drawn(*self._loops[key](*values))

    def _backbone_graph(self, requests: int, pages: int, page_size: int, store: KVStore) -> Graphed:
        config, K = self.config, self.block_size
        scale = config.head_dim**-0.5

        def backbone(anchors_R: Tensor, positions_R: Tensor, pages_RP: Tensor) -> Tensors:
            slots_RS = page_slots(pages_RP, page_size, store)
            last_R1 = positions_R[:, None] + K - 1  # all rows see the whole block
            mask_R11S = padded_mask(last_R1, slots_RS.shape[1], store.keys[0].dtype)
            own_RK = positions_R[:, None] + torch.arange(K, device=positions_R.device)
            own_N = slots_RS.gather(1, own_RK).flatten()

            def attend(query_NHd: Tensor, layer: int) -> Tensor:
                return padded_attention(query_NHd, slots_RS, mask_R11S, store, layer, scale=scale)

            hidden_RKD = self._backbone(anchors_R, positions_R, own_N, store, attend)
            return _present(self._candidates(hidden_RKD))

        nobody = torch.zeros((), dtype=torch.int64, device=store.device)
        scratch = torch.full(
            (pages,), scratch_page(store, page_size), dtype=torch.int64, device=store.device
        )
        return Graphed(backbone, [nobody, nobody, scratch], requests, self._capture)

    def _loop_graph(self, requests: int, truncated: bool, values: Sequence[Tensor]) -> Graphed:
        def loop(anchors_R: Tensor, noise_RKC: Tensor, rows_R5: Tensor, *parts: Tensor) -> Tensors:
            hidden_RKD, base_RKC, ids_RKC, *columns = parts
            proposals = Proposals(hidden_RKD, base_RKC, ids_RKC, columns[0] if columns else None)

            def draw_slot(slot: int, logits_RC: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
                logits_RC = logits_RC.double()
                probs_RC = probs_from_rows(logits_RC, rows_R5, truncated=truncated)
                winners_R = race(probs_RC, noise_RKC[:, slot])
                return probs_RC, ids_RKC[:, slot].gather(1, winners_R[:, None])[:, 0]

            return _present(self._left_to_right(anchors_R, proposals, draw_slot))

        # Ones, so that nothing is divided by zero where nobody looks.
        device = values[0].device
        padding = [torch.ones(v.shape[1:], dtype=v.dtype, device=device) for v in values]
        return Graphed(loop, padding, requests, self._capture)


def _present(parts: Sequence[Tensor | None]) -> Tensors:
    return tuple(part for part in parts if part is not None)
