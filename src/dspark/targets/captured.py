"""A target whose common steps are captured: plain decoding, and verification of short drafts.

One graph holds the decoder from token ids to final hidden states, for so many requests (rounded up
to a power of two) with so many rows each and room for so many pages (`nn.padded_attention`). A
request with fewer rows than the others repeats its last one; what such rows write goes to a slot
that nobody reads. The LM head runs behind the graph, on the rows that are asked for.

Graphs are made the first time a size is met.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dspark.nn.graphs import Capture, Graphed
from dspark.nn.kv_cache import KVStore
from dspark.nn.padded_attention import (
    PaddedPlan,
    padded_pages,
    padded_size,
    page_slots,
    scratch_page,
    scratch_slot,
)
from dspark.nn.seams import RaggedBatch, TargetOutput
from dspark.targets.attention_hook import StepContext
from dspark.targets.fast_path import FAST_LAYERS, FastDecoder
from dspark.targets.hf import HFTarget

MOST_QUERIES = 17
"""Rows of one request: an anchor and the longest block of the paper's."""
MOST_ROWS = 512
"""Rows of a step, as padded. With more of them a step is bound by its products rather than by the
starts of its kernels; where that begins has not been measured."""
MOST_KEYS = 1 << 17
"""Positions of all requests together, as padded: each layer copies their keys and values, 512 MiB
in bf16 with 8 heads of 128. Up to where that is worth it has not been measured."""
MOST_GRAPHS = 64
"""Graphs of one engine. They share the memory of their temporaries, and hold a few MB each."""

LIMITS = (
    f"steps without prompts, of up to {MOST_QUERIES} rows a request, {MOST_ROWS} rows and "
    f"{MOST_KEYS} positions, in at most {MOST_GRAPHS} sizes, captured when first met; all others "
    "run eagerly"
)

_Size = tuple[int, int, int, int, tuple[int, ...]]
"""Requests, rows of each, pages of each, page size, tapped layers."""


def why_eager(model: Any) -> str | None:
    """Why steps of this model cannot be captured; None where they can."""
    decoder = model.get_decoder()
    if not FastDecoder.fits(decoder):
        return f"its layers are not those of {', '.join(FAST_LAYERS)}"
    rope = (getattr(decoder.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if "dynamic" in rope or rope == "longrope":
        return f"its RoPE ({rope}) depends on the longest position of a step"
    return None


class CapturedTarget(HFTarget):
    """An `HFTarget` some of whose steps are captured. It runs eagerly, as that one does,

    * exact steps (law 5): the padded form was not shown to have the same bits,
    * steps with rows of prompts, and those of which all final hidden states are wanted,
    * what is beyond the bounds above.
    """

    def __init__(self, model: nn.Module, *, capture: Capture) -> None:
        assert why_eager(model) is None
        super().__init__(model)
        self._capture = capture
        # A graph is bound to the memory of a store, and goes with it.
        self._graphs: WeakKeyDictionary[KVStore, dict[_Size, Graphed]] = WeakKeyDictionary()

    def captures(self, batch: RaggedBatch) -> bool:
        """Whether a step of this size may be captured."""
        if batch.exact or batch.prompt_from is not None:
            return False
        queries = max(_counts(batch))
        requests, pages = padded_size(batch.tables)
        return (
            queries <= MOST_QUERIES
            and requests * queries <= MOST_ROWS
            and requests * pages * batch.tables[0].page_size <= MOST_KEYS
        )

    def forward(
        self,
        batch: RaggedBatch,
        store: KVStore,
        *,
        logit_rows_M: Tensor,
        tap_layers: tuple[int, ...] = (),
        want_final: bool = False,
    ) -> TargetOutput:
        """See `Target.forward`."""
        graph = None
        if not want_final and self.captures(batch):
            graph = self._graph(batch, store, tap_layers)
        if graph is None:
            return super().forward(
                batch,
                store,
                logit_rows_M=logit_rows_M,
                tap_layers=tap_layers,
                want_final=want_final,
            )
        counts = torch.tensor(_counts(batch))
        queries = int(counts.max())
        own_n = torch.arange(queries)
        first_R1 = torch.tensor(batch.starts[:-1])[:, None]
        rows_Rn = first_R1 + torch.minimum(own_n, counts[:, None] - 1)
        real_Rn = own_n < counts[:, None]
        with torch.inference_mode():
            rows_Rn = rows_Rn.to(self.device)
            slots_Rn = batch.slots_N[rows_Rn].masked_fill_(
                ~real_Rn.to(self.device), scratch_slot(store)
            )
            pages_RP = padded_pages(batch.tables, padded_size(batch.tables)[1])
            outputs = graph(batch.tokens_N[rows_Rn], batch.positions_N[rows_Rn], slots_Rn, pages_RP)
            real_N = real_Rn.flatten().nonzero()[:, 0].to(self.device)
            final_ND, *taps = (output.flatten(0, 1)[real_N] for output in outputs)
            return TargetOutput(
                logits_MV=self.model.lm_head(final_ND[logit_rows_M]).float(),
                taps_NF=taps[0].float() if taps else None,
                final_ND=None,
            )

    def _graph(
        self, batch: RaggedBatch, store: KVStore, tap_layers: tuple[int, ...]
    ) -> Graphed | None:
        """None where there are too many already."""
        page_size = batch.tables[0].page_size
        requests, pages = padded_size(batch.tables)
        size = requests, max(_counts(batch)), pages, page_size, tap_layers
        graphs = self._graphs.setdefault(store, {})
        if size not in graphs and len(graphs) < MOST_GRAPHS:
            with torch.inference_mode():
                graphs[size] = self._capture_decoder(size, store)
        return graphs.get(size)

    def _capture_decoder(self, size: _Size, store: KVStore) -> Graphed:
        requests, queries, pages, page_size, tap_layers = size

        def decode(
            tokens_Rn: Tensor, positions_Rn: Tensor, slots_Rn: Tensor, pages_RP: Tensor
        ) -> tuple[Tensor, ...]:
            plan = PaddedPlan(
                positions_Rn, slots_Rn.flatten(), page_slots(pages_RP, page_size, store)
            )
            final_ND, taps = self._decode(
                tokens_Rn.flatten(), positions_Rn.flatten(), StepContext(plan, store), tap_layers
            )
            outputs = [final_ND, torch.cat(taps, dim=-1)] if taps else [final_ND]
            return tuple(output.view(*tokens_Rn.shape, -1) for output in outputs)

        def row(count: int, value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int64, device=self.device)

        nobody = [
            row(queries, 0),
            row(queries, 0),
            row(queries, scratch_slot(store)),
            row(pages, scratch_page(store, page_size)),
        ]
        return Graphed(decode, nobody, requests, self._capture)

    def _decode(
        self, tokens_N: Tensor, positions_N: Tensor, step: StepContext, tap_layers: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Final hidden states, and those after the tapped layers; nothing of them is kept."""
        self._taps = dict.fromkeys(tap_layers, torch.empty(0))
        final = self.decoder(
            input_ids=tokens_N[None],
            position_ids=positions_N[None],
            use_cache=False,
            dspark_step=step,
        ).last_hidden_state[0]
        taps, self._taps = [self._taps[layer] for layer in tap_layers], {}
        self._final = None
        return final, taps


def _counts(batch: RaggedBatch) -> Sequence[int]:
    """Rows of each request."""
    return [end - start for start, end in pairwise(batch.starts)]
