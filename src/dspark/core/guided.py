"""What guided decoding may be asked to match."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dspark.core.errors import ConfigError

GuidedKind = Literal["json_schema", "regex", "grammar"]
KINDS: tuple[GuidedKind, ...] = ("json_schema", "regex", "grammar")
_MOST_CHARACTERS = 256 * 1024


@dataclass(frozen=True, slots=True)
class Guided:
    """The whole text must match this; `Guided.json_schema(...)`, `.regex(...)`, `.grammar(...)`.

    Raises ConfigError for a value that is empty, too long, or JSON that is none. Whether the
    library can compile it is known when a request comes to an engine.
    """

    kind: GuidedKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"guided kind is {self.kind!r}; it must be {' or '.join(KINDS)}")
        if not isinstance(self.text, str) or not self.text.strip():
            raise ConfigError(f"{self.kind} is empty; give what the text must match")
        if len(self.text) > _MOST_CHARACTERS:
            raise ConfigError(
                f"{self.kind} has {len(self.text):,} characters; the limit is {_MOST_CHARACTERS:,}"
            )

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> "Guided":
        """JSON that fits a schema, given as text or as a dictionary; `{}` is any JSON value."""
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema is not JSON: {error}") from error
        if not isinstance(value, Mapping):
            raise ConfigError(f"json_schema is {text[:40]}; it must be a JSON object")
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> "Guided":
        """A regular expression in Rust's dialect: no look-around, no back-references."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, lark: str) -> "Guided":
        """A context-free grammar in Lark's notation, as llguidance reads it."""
        return cls("grammar", lark)


def guided_value(value: object) -> Guided | None:
    """`value` if it is one, else a ConfigError."""
    if value is not None and not isinstance(value, Guided):
        raise ConfigError(
            f"guided is {value!r}; it must be Guided.json_schema(...), Guided.regex(...) or "
            f"Guided.grammar(...)"
        )
    return value
