"""Tool calls in Hermes' format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Qwen, Hermes and many others write it. A call that is no such JSON stays text: nothing is guessed.
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(slots=True)
class ToolCalls:
    """Splits a growing text into content and calls; what may be the start of a call is held
    back."""

    count: int = 0
    _held: str = ""

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The content that is certain, and the calls that are complete."""
        self._held += text
        content, calls = "", []
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                kept = _overlap(self._held, _OPEN)
                content += self._held[: len(self._held) - kept]
                self._held = self._held[len(self._held) - kept :]
                break
            content += self._held[:start]
            end = self._held.find(_CLOSE, start)
            if end < 0:
                self._held = self._held[start:]
                break
            whole = self._held[start : end + len(_CLOSE)]
            self._held = self._held[end + len(_CLOSE) :]
            call = self._parse(whole[len(_OPEN) : -len(_CLOSE)])
            if call is None:
                content += whole
            else:
                calls.append(call)
        return content, calls

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What was held back. A text may end at its call's last brace, without the closing tag."""
        held, self._held = self._held, ""
        if held.startswith(_OPEN) and (call := self._parse(held[len(_OPEN) :])) is not None:
            return "", [call]
        return held, []

    def _parse(self, text: str) -> dict[str, Any] | None:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        self.count += 1
        return {
            "index": self.count - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(arguments)},
        }


def _overlap(text: str, tag: str) -> int:
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
