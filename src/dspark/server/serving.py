"""What one server serves: the parts that every route needs, put together by `recipes`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.core.records import EngineStats
from dspark.engine.service import EngineService
from dspark.server.auth import ApiKeys
from dspark.server.config import ServerConfig
from dspark.server.limits import KeyLimits
from dspark.server.live import LiveView
from dspark.server.metrics import ServerMetrics
from dspark.server.rounds import RoundNotes

EncodeChat = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], list[int]]
"""(messages, tools) -> token ids up to where the answer starts. Raises PromptError."""


@dataclass(slots=True)
class Serving:
    name: str
    """What clients call the model."""
    engine: EngineService
    tokenizer: Any
    encode_chat: EncodeChat
    takes_tools: bool
    """The target's chat template has a place for tools."""
    config: ServerConfig
    keys: ApiKeys
    limits: KeyLimits
    metrics: ServerMetrics
    live: LiveView
    notes: RoundNotes
    about: Mapping[str, Any]
    """Target, drafter, policy, weights, version: for people."""
    created: int
    """Unix time at start."""
    draining: bool = False
    token_texts: dict[int, str] = field(default_factory=dict)

    def stats(self) -> EngineStats:
        """How the engine is doing, read without stopping it."""
        return self.engine.engine.stats()

    @property
    def max_context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        stats = self.stats()
        return min(self.engine.engine.target.max_context, stats.pages * stats.page_size)

    @property
    def last_token(self) -> int:
        """The highest token id that has a text."""
        return len(self.tokenizer) - 1
