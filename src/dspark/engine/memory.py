"""Keys and values of target and drafter in one budget: pages, prefix cache, and what they cost.

One page table serves both stores, so a page that is shared, kept or copied brings the drafter's
context K/V along with the target's (law 7).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dspark.engine.budget import budget_tokens
from dspark.engine.config import EngineConfig
from dspark.engine.prefix import PrefixIndex, page_digests
from dspark.engine.request import RequestState
from dspark.nn.attention import KEY_TILE
from dspark.nn.kv_cache import KVStore
from dspark.nn.pages import PageCopies, PagePool
from dspark.nn.seams import Drafter, Target


@dataclass(slots=True)
class MemoryCounts:
    """Counted since the start."""

    prompt_tokens: int = 0
    """Of requests at admission, resumed ones included."""
    prefix_hits: int = 0
    """Admissions that found a beginning of their prompt."""
    prefix_hit_tokens: int = 0
    copied_pages: int = 0
    """Copied to where a request has an extent of its own."""
    evicted_pages: int = 0
    """Taken from the prefix cache."""


class KVMemory:
    """Who has which pages, and the two stores that they index."""

    def __init__(self, target: Target, drafter: Drafter | None, config: EngineConfig) -> None:
        self.beyond = drafter.block_size if drafter is not None else 0
        """Positions after the end of a text that its last draft block may cover."""
        dtype: torch.dtype = getattr(torch, config.cache_dtype)
        shapes = [target.kv_shape] + ([drafter.kv_shape] if drafter is not None else [])
        self.bytes_per_token = sum(shape.bytes_per_token(dtype) for shape in shapes)
        tokens = config.cache_tokens
        if tokens is None:
            tokens = budget_tokens(
                self.bytes_per_token,
                share=config.memory_share,
                most_tokens=config.max_requests * (target.max_context + self.beyond),
                device=target.device,
            )
        self.config = config
        self.counts = MemoryCounts()
        self.index = PrefixIndex()
        self.pool = PagePool(
            -(-tokens // config.page_size),
            config.page_size,
            requests=config.max_requests,
            on_evict=self._evicted,
        )
        slots = self.pool.num_pages * config.page_size
        stores = [
            KVStore(shape, slots, read_ahead=KEY_TILE, dtype=dtype, device=target.device)
            for shape in shapes
        ]
        self.store = stores[0]
        self.draft_store = stores[1] if drafter is not None else None

    @property
    def tokens(self) -> int:
        """What fits."""
        return self.pool.num_pages * self.pool.page_size

    def describe(self) -> str:
        """A start-up line."""
        size = self.tokens * self.bytes_per_token / 2**30
        return (
            f"KV memory: {self.tokens} tokens in {self.pool.num_pages} pages of "
            f"{self.pool.page_size}, {size:.2f} GiB ({self.bytes_per_token / 1024:.1f} KiB a token)"
        )

    def digests(self, prompt: tuple[int, ...]) -> tuple[bytes, ...]:
        """What a new request is known by in the prefix cache; nothing where there is none."""
        return page_digests(prompt, self.pool.page_size) if self.config.prefix_cache else ()

    def admit(self, state: RequestState, tokens: int, *, headroom: int) -> bool:
        """Pages for the first `tokens` positions, those of a known prompt beginning shared.

        Leaves `headroom` pages free, or changes nothing and returns False. `state.cached` is then
        what need not be computed.
        """
        assert not state.table.pages and state.cached == 0
        pages, exact = self._find(state)
        self.pool.share(state.table, pages)
        needed = self.pool.pages_for(tokens) - len(pages) + headroom
        if needed > self.pool.free_pages or not self.reserve(state, tokens):
            self.pool.release(state.table)
            return False
        state.cached, state.published = len(pages) * self.pool.page_size, len(pages)
        state.exact_prefix = exact
        self.counts.prompt_tokens += len(state.request.prompt)
        self.counts.prefix_hits += bool(pages)
        self.counts.prefix_hit_tokens += state.cached
        return True

    def reserve(self, state: RequestState, tokens: int) -> bool:
        """Lets a request write positions below `tokens`; False, and nothing changed, for want of
        pages."""
        most_tokens = state.request.most_tokens + self.beyond
        copies = self.pool.grow(state.table, tokens, most_tokens)
        if copies is None:
            return False
        self._copy(copies)
        return True

    def release(self, state: RequestState) -> None:
        """Takes the pages back; those in the prefix cache are kept until their place is needed."""
        self.pool.release(state.table)
        state.computed = max(state.computed, state.cached)
        state.cached = state.published = 0
        state.features.clear()

    def scrub(self, state: RequestState) -> None:
        """Before a failed request gives its pages back: numbers in them that are none become zeros.

        Attention reads whole tiles, and a masked NaN would still spoil a sum. What others share is
        left to the last of them: they fail as well.
        """
        size = self.pool.page_size
        stores = [store for store in (self.store, self.draft_store) if store is not None]
        for page in state.table.pages:
            if self.pool.is_shared(page):
                continue
            for store in stores:
                for memory in (*store.keys, *store.values):
                    rows = memory[page * size : (page + 1) * size]
                    if not torch.isfinite(rows).all():
                        rows.nan_to_num_(0.0, 0.0, 0.0)
                        self.pool.forget(page)

    def publish(self, state: RequestState, *, exact: bool) -> None:
        """Offers full pages of a prompt to others, once both stores hold them.

        exact: whether the step that computed the newest of them was row-exact.
        """
        state.exact_prefix &= exact
        full = min(state.cached, len(state.request.prompt)) // self.pool.page_size
        for digest, page in list(zip(state.digests, state.table.pages, strict=False))[
            state.published : full
        ]:
            if self.index.add(digest, page, exact=state.exact_prefix):
                self.pool.keep(page)
        state.published = max(state.published, full)

    def is_coming(self, state: RequestState, running: Iterable[RequestState]) -> bool:
        """Whether somebody is computing the very page that this request would compute first."""
        known = len(self._find(state)[0])
        if known == len(state.shareable):
            return False
        return any(
            other.prefilling
            and other.published <= known < len(other.digests)
            and other.digests[known] == state.digests[known]
            for other in running
        )

    def check_integrity(self, running: Iterable[RequestState]) -> None:
        """Law 6."""
        self.pool.check_integrity([state.table for state in running])
        assert self.pool.kept_pages <= len(self.index)

    def _find(self, state: RequestState) -> tuple[list[int], bool]:
        exact = state.request.exact and self.config.row_exact
        return self.index.find(state.shareable, exact=exact)

    def _copy(self, copies: PageCopies) -> None:
        for store in (self.store, self.draft_store):
            if store is not None:
                store.copy(copies, self.pool.page_size)
        self.counts.copied_pages += len(copies)

    def _evicted(self, page: int) -> None:
        self.index.forget(page)
        self.counts.evicted_pages += 1
