"""How an engine is set up."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dspark.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    max_requests: int = 32
    """Requests that decode at once; more wait."""
    chunk_tokens: int = 512
    """Prompt tokens of one request in one step (chunked prefill)."""
    cache_tokens: int = 32 * 1024
    """KV budget of target and drafter together, in tokens."""
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    """What keys and values are stored and attended in. bfloat16 halves the memory and the time that
    long contexts and large batches spend on it, and is a slightly other target."""
    page_size: int = 64
    """Tokens of a page."""
    row_exact: bool = True
    """Make a row's result independent of the batch, for batches that hold a greedy or `coupled`
    request (law 5). Off is for timing plain decoding without tiles that only speculation needs."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "chunk_tokens", "cache_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @classmethod
    def for_requests(
        cls, most_tokens: Iterable[int], *, max_requests: int, row_exact: bool
    ) -> "EngineConfig":
        """A cache just large enough for the longest `max_requests` of some requests.

        most_tokens: per request, prompt and new tokens together.
        """
        page = cls().page_size
        needs = sorted(-(-tokens // page) * page for tokens in most_tokens)
        cache_tokens = max(page, sum(needs[-max_requests:]))
        return cls(max_requests=max_requests, cache_tokens=cache_tokens, row_exact=row_exact)
