"""Prompt files and the one split rule.

A prompt file is jsonl. A line is one of

    {"turns": ["first user turn", "second", ...]}
    {"prompt": "the only user turn"}
    {"messages": [{"role": "system" | "user" | "assistant", "content": "..."}, ...]}

Assistant messages are dropped: the target writes its own answers. A file's stem is its domain.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dspark.core.errors import DataError


@dataclass(frozen=True, slots=True)
class Prompt:
    file: str
    """Stem of the prompt file; also the domain in every report."""
    line: int
    """1-based line in that file. (file, line) names a prompt for good."""
    turns: tuple[str, ...]
    """User turns, at least one, none empty."""
    system: str | None = None

    @property
    def is_validation(self) -> bool:
        return is_validation(self.turns[0])


def is_validation(first_user_turn: str) -> bool:
    """The split rule of every use of prompts: sha256 of the first user turn is 0 modulo 10.

    Such a prompt is never trained on.
    """
    return int(hashlib.sha256(first_user_turn.encode()).hexdigest(), 16) % 10 == 0


def read_prompts(*paths: Path | str) -> list[Prompt]:
    """Prompts of the given jsonl files, and of every ``*.jsonl`` of the given folders, in order.

    Raises DataError for a missing path, a folder without prompts, two files of one stem, a broken
    line.
    """
    prompts: list[Prompt] = []
    seen: dict[str, Path] = {}
    for file in _expand(Path(path) for path in paths):
        if file.stem in seen:
            raise DataError(
                f"{file} and {seen[file.stem]} have the same name; it names the domain: rename one"
            )
        seen[file.stem] = file
        prompts += _read_file(file)
    return prompts


def _expand(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"))
            if not found:
                raise DataError(f"{path} holds no .jsonl file")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"there is no prompt file or folder {path}")
    return files


def _read_file(file: Path) -> list[Prompt]:
    prompts = []
    # Split on "\n" alone: str.splitlines would also cut at U+2028 and its kind inside a JSON
    # string.
    try:
        lines = file.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 (byte {error.start})") from None
    for number, text in enumerate(lines, start=1):
        if text.strip():
            turns, system = _parse(text, f"{file}, line {number}")
            prompts.append(Prompt(file.stem, number, turns, system))
    if not prompts:
        raise DataError(f"{file} holds no prompt")
    return prompts


def _parse(text: str, where: str) -> tuple[tuple[str, ...], str | None]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno})") from None
    system: str | None = None
    match record:
        case {"turns": list(turns)}:
            pass
        case {"prompt": turn}:
            turns = [turn]
        case {"messages": list(messages)}:
            if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
                raise DataError(f"{where}: every message needs a role and a content")
            turns = [m["content"] for m in messages if m["role"] == "user"]
            system = next((m["content"] for m in messages if m["role"] == "system"), None)
        case _:
            raise DataError(f'{where}: expected "turns", "prompt" or "messages"')
    texts = turns if system is None else [*turns, system]
    if not turns or not all(isinstance(t, str) and t.strip() for t in texts):
        raise DataError(f"{where}: every turn must be text and not empty")
    return tuple(turns), system
