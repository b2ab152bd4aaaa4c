"""Requests in pages and ragged steps over them, for tests of targets and attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark.nn.attention import KEY_TILE
from dspark.nn.kv_cache import KVShape, KVStore
from dspark.nn.pages import PagePool, PageTable
from dspark.nn.seams import RaggedBatch
from dspark.targets.hf import HFTarget
from dspark.targets.pack import pack_model
from dspark.targets.tiny import tiny_model


def packed_target(
    model: Any, kind: str = "fp32", *, allow_fast: bool = True, many_requests: bool = False
) -> HFTarget:
    packed = pack_model(model, kind, allow_fast=allow_fast, many_requests=many_requests)
    return HFTarget(model, mode=packed.mode, fast=packed.fast)


def tiny_target(model_type: str, *, allow_fast: bool = True, **overrides: Any) -> HFTarget:
    return packed_target(tiny_model(model_type, **overrides), allow_fast=allow_fast)


def make_batch(
    runs: Sequence[tuple[PageTable, int, Sequence[int]]],
    *,
    exact: bool = True,
    prompt_from: int | None = None,
) -> RaggedBatch:
    """One step: per request its pages, the tokens it has cached, and its new tokens."""
    starts = [0]
    for _, _, tokens in runs:
        starts.append(starts[-1] + len(tokens))
    spans = [(table, cached, cached + len(tokens)) for table, cached, tokens in runs]
    return RaggedBatch(
        tokens_N=torch.tensor([token for _, _, tokens in runs for token in tokens]),
        positions_N=torch.cat([torch.arange(start, end) for _, start, end in spans]),
        requests_N=torch.cat(
            [torch.full((len(tokens),), r) for r, (_, _, tokens) in enumerate(runs)]
        ),
        slots_N=torch.cat([table.slots(start, end) for table, start, end in spans]),
        starts=tuple(starts),
        context_lengths=tuple(end for _, _, end in spans),
        tables=tuple(table for table, _, _ in runs),
        exact=exact,
        prompt_from=prompt_from,
    )


def scattered(pool: PagePool, tokens: int, generator: torch.Generator) -> PageTable:
    """Pages in no order at all."""
    free = torch.from_numpy(pool._holders == 0).nonzero()[:, 0]
    pages = free[torch.randperm(len(free), generator=generator)][: pool.pages_for(tokens)].tolist()
    table = PageTable([], pool.page_size)
    pool._hold(table, pages)
    return table


def garbage_store(
    shape: KVShape, slots: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> KVStore:
    """A store in which every slot nobody wrote holds large finite values, not convenient zeros."""
    store = KVStore(shape, slots, read_ahead=KEY_TILE, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for memory in (*store.keys, *store.values):
        memory.normal_(0.0, 50.0, generator=generator)
    return store


@dataclass
class Session:
    """Texts that a target reads in pieces, several of them side by side."""

    target: HFTarget
    page_size: int = 4
    pages: int = 256
    exact: bool = True
    prompt_from: int | None = None
    dtype: torch.dtype = torch.float32
    taps: tuple[int, ...] = ()
    scatter: torch.Generator | None = None
    pool: PagePool = field(init=False)
    store: KVStore = field(init=False)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.pages, self.page_size)
        slots = self.pages * self.page_size
        self.store = garbage_store(self.target.kv_shape, slots, dtype=self.dtype)

    def table(self, tokens: int) -> PageTable:
        if self.scatter is not None:
            return scattered(self.pool, tokens, self.scatter)
        return self.pool.allocate(tokens)

    def step(self, runs: Sequence[tuple[PageTable, int, Sequence[int]]]) -> Any:
        batch = make_batch(runs, exact=self.exact, prompt_from=self.prompt_from)
        return self.target.forward(
            batch,
            self.store,
            logit_rows_M=torch.arange(len(batch.tokens_N)),
            tap_layers=self.taps,
            want_final=True,
        )

    def read(
        self, texts: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]
    ) -> list[dict[str, Tensor]]:
        """Reads each text in pieces that end at its `cuts`; one piece of every text a step.

        Returns per text its rows of logits, taps and final hidden states.
        """
        tables = [self.table(len(text)) for text in texts]
        ends = [[*own, len(text)] for own, text in zip(cuts, texts, strict=True)]
        done = [0] * len(texts)
        rows: list[list[Any]] = [[] for _ in texts]
        for turn in range(max(len(own) for own in ends)):
            active = [r for r in range(len(texts)) if turn < len(ends[r])]
            runs = [(tables[r], done[r], texts[r][done[r] : ends[r][turn]]) for r in active]
            output = self.step(runs)
            start = 0
            for r, (_, _, tokens) in zip(active, runs, strict=True):
                span = slice(start, start + len(tokens))
                taps = output.taps_NF[span] if output.taps_NF is not None else None
                rows[r].append((output.logits_MV[span], taps, output.final_ND[span]))
                start, done[r] = span.stop, ends[r][turn]
        for table in tables:
            self.pool.release(table)
        names = ("logits", "taps", "final") if self.taps else ("logits",)
        columns = {"logits": 0, "taps": 1, "final": 2}
        return [
            {name: torch.cat([piece[columns[name]] for piece in own]) for name in names}
            | {"final": torch.cat([piece[2] for piece in own])}
            for own in rows
        ]


def random_text(length: int, vocab: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()
