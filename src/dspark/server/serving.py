"""What one server serves: the parts that every route needs, put together by `recipes`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.engine.service import EngineService
from dspark.server.auth import ApiKeys
from dspark.server.config import ServerConfig
from dspark.server.limits import KeyLimits
from dspark.server.live import LiveView
from dspark.server.metrics import ServerMetrics
from dspark.server.rounds import RoundNotes

_GAUGES = {
    "running": "Choices that decode or whose prompt is being computed",
    "waiting": "Choices in the queue",
    "pages_used": "Pages of keys and values in use",
    "pages_total": "Pages of keys and values",
}
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

    def engine_numbers(self) -> dict[str, int]:
        """How busy the engine is, read without stopping it."""
        engine = self.engine.engine
        pool = engine.pool
        return {
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "pages_used": pool.num_pages - pool.free_pages,
            "pages_total": pool.num_pages,
        }

    def add_gauges(self) -> None:
        """Numbers that the engine knows at any moment, as metrics."""
        for name, meaning in _GAUGES.items():
            self.metrics.gauge(name, meaning, lambda name=name: self.engine_numbers()[name])

    @property
    def max_context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        engine = self.engine.engine
        return min(engine.target.max_context, engine.pool.num_pages * engine.pool.page_size)
