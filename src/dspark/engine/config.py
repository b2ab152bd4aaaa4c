"""How an engine is set up."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

from dspark.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    max_requests: int = 32
    """Requests that decode at once; more wait."""
    chunk_tokens: int = 512
    """Prompt tokens of one request in one step (chunked prefill)."""
    cache_tokens: int | None = None
    """KV budget of target and drafter together, in tokens; None sizes it from the memory that is
    free, at most what `max_requests` of the longest context need."""
    memory_share: float = 0.5
    """The share of the free memory that an unstated budget takes."""
    prefix_cache: bool = True
    """Keep the pages of prompts for later requests that begin alike."""
    max_waiting: int | None = None
    """Requests that may wait for a place; more are refused (OverloadedError)."""
    max_waiting_tokens: int | None = None
    """Prompt and new tokens that waiting requests may have together."""
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    """What keys and values are stored and attended in. bfloat16 halves the memory and the time that
    long contexts and large batches spend on it, and is a slightly other target."""
    page_size: int = 64
    """Tokens of a page."""
    row_exact: bool = True
    """Make a row's result independent of the batch, for batches that hold a greedy or `coupled`
    request (law 5). Off is for timing plain decoding without tiles that only speculation needs.
    Off the CPU it is always off (`on`)."""

    pipeline: bool = False
    """Write texts and hand out events in a thread of its own while the next step computes. The
    tokens are the same; see docs/architecture.md for when it is worth a thread."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "chunk_tokens", "page_size"):
            self._check_count(name)
        for name in ("cache_tokens", "max_waiting", "max_waiting_tokens"):
            if getattr(self, name) is not None:
                self._check_count(name)
        if not 0.0 < self.memory_share <= 1.0:
            raise ConfigError(f"memory_share is {self.memory_share}; it must be in (0, 1]")

    def on(self, device_type: str) -> Self:
        """For a target there. Off the CPU no kernel was measured: tiles would promise nothing."""
        return self if device_type == "cpu" else replace(self, row_exact=False)

    def _check_count(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @classmethod
    def for_requests(
        cls,
        most_tokens: Iterable[int],
        *,
        max_requests: int,
        row_exact: bool,
        block_size: int = 0,
        prefix_cache: bool = True,
        pipeline: bool = False,
    ) -> "EngineConfig":
        """A cache large enough for the longest `max_requests` of some requests, each in an extent
        of its own (nn.pages).

        most_tokens: per request, prompt and new tokens together.
        block_size: the drafter's: a block's own keys and values may lie behind the text.
        """
        page = cls().page_size
        pages = (-(-(tokens + block_size) // page) for tokens in most_tokens)
        needs = sorted(page << (count - 1).bit_length() for count in pages)
        max_requests = max(1, min(max_requests, len(needs)))
        return cls(
            max_requests=max_requests,
            cache_tokens=max(page, sum(needs[-max_requests:])),
            row_exact=row_exact,
            prefix_cache=prefix_cache,
            pipeline=pipeline,
        )
