"""Prompts and the one split rule.

A prompt is the user's side of a record (see `data.conversation` for the forms); the target writes
its own answers, and those that the record holds are used only where that is asked for. A file's
stem is its domain.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.core.errors import DataError
from dspark.data.conversation import Message, parse_conversation
from dspark.data.records import find_files, read_records


@dataclass(frozen=True, slots=True)
class Prompt:
    file: str
    """Stem of the prompt file; also the domain in every report."""
    line: int
    """1-based line in that file. (file, line) names a prompt for good."""
    turns: tuple[str, ...]
    """User turns, at least one, none empty."""
    system: str | None = None
    answers: tuple[str | None, ...] = ()
    """What the record's assistant said after each turn, None where it said nothing; () for a record
    without any."""

    def conversation(self, answers: Sequence[str | None]) -> list[Message]:
        """The system message and the first turns, each with what was said to it."""
        system: list[Message] = (
            [] if self.system is None else [{"role": "system", "content": self.system}]
        )
        talk: list[Message] = []
        for turn, answer in zip(self.turns, answers, strict=False):
            talk.append({"role": "user", "content": turn})
            if answer is not None:
                talk.append({"role": "assistant", "content": answer})
        return system + talk

    @property
    def is_validation(self) -> bool:
        return is_validation(self.turns[0])


def is_validation(first_user_turn: str) -> bool:
    """The split rule of every use of prompts: sha256 of the first user turn is 0 modulo 10.

    Such a prompt is never trained on.
    """
    return int(hashlib.sha256(first_user_turn.encode()).hexdigest(), 16) % 10 == 0


def read_prompts(
    *paths: Path | str,
    skip_bad: bool = False,
    say: Callable[[str], None] = lambda _line: None,
) -> list[Prompt]:
    """Prompts of jsonl and parquet files, saved datasets, and folders of these, in order.

    Raises DataError for a missing path, a folder without prompts, two files of one stem, and for
    bad lines, with the first and how many of which kind there are. With `skip_bad` these are left
    out, and `say` gets the counts.
    """
    prompts: list[Prompt] = []
    seen: dict[str, Path] = {}
    for file in find_files(Path(path) for path in paths):
        if file.stem in seen:
            raise DataError(
                f"{file} and {seen[file.stem]} have the same name; it names the domain: rename one"
            )
        seen[file.stem] = file
        found, bad = scan_prompts(file)
        if bad and not skip_bad:
            more = "" if len(bad) == 1 else f" ({count_kinds(bad)})"
            raise DataError(f"{bad[0]}{more}; fix it, or leave bad lines out with --skip-bad")
        if bad:
            say(f"{file}: {count_kinds(bad)} left out; the first: {bad[0]}")
        if not found:
            raise DataError(f"{file} holds no prompt")
        prompts += found
    return prompts


def scan_prompts(file: Path) -> tuple[list[Prompt], list[DataError]]:
    """The prompts of one file, and what is wrong with its other lines."""
    prompts: list[Prompt] = []
    bad: list[DataError] = []
    for number, record in read_records(file):
        try:
            if isinstance(record, DataError):
                raise record
            messages = parse_conversation(record, f"{file}, line {number}")
        except DataError as error:
            bad.append(error)
            continue
        prompts.append(_prompt(file.stem, number, messages))
    return prompts, bad


def _prompt(stem: str, number: int, messages: list[Message]) -> Prompt:
    turns: list[str] = []
    answers: list[str | None] = []
    system = None
    for message in messages:
        if message["role"] == "system":
            system = message["content"]
        elif message["role"] == "user":
            turns.append(message["content"])
            answers.append(None)
        else:
            answers[-1] = message["content"]
    return Prompt(stem, number, tuple(turns), system, tuple(answers) if any(answers) else ())


def count_kinds(bad: list[DataError]) -> str:
    """ "3 bad lines: 2 not JSON, 1 unknown role": kinds are how the messages begin."""
    kinds = Counter(_kind(str(error)) for error in bad)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{len(bad)} bad line{'s' if len(bad) > 1 else ''}: {listed}"


def _kind(message: str) -> str:
    """What follows "FILE, line N: ", without its particulars."""
    kind = message.split(": ", 1)[-1].split("; ")[0].split(" (")[0]
    return "unknown role" if kind.startswith("unknown role") else kind
