"""User turns that the target writes itself.

A chat model was trained on whole conversations, so after its template's user prefix it goes on as a
user would (Xu et al., "Magpie", arXiv 2406.08464). Its own topics and wording are what its drafter
will meet.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.core.errors import ConfigError, DataError
from dspark.data.lines import append_lines, cut_torn_line, whole_lines

_MARK = "dsparkmarksaturn"
_SHORTEST = 8
"""Characters of a turn; shorter ones are greetings at best."""


@dataclass(frozen=True, slots=True)
class UserPrefix:
    """Where a user's turn begins, and what shows that it has ended."""

    token_ids: list[int]
    stop_token_ids: tuple[int, ...]
    """Beside the target's own ends of text."""
    stops: tuple[str, ...]
    """Where no special token ends a turn."""


def user_prefix(tokenizer: Any) -> UserPrefix:
    """What the chat template puts before and behind the first user turn, its default system message
    included. A tokenizer without a template begins a text, and a blank line ends it.

    Raises ConfigError for a template that cannot be asked, and a tokenizer with nothing to begin
    with.
    """
    if tokenizer.chat_template is None:
        first = tokenizer.bos_token_id
        first = tokenizer.eos_token_id if first is None else first
        if first is None:
            raise ConfigError(
                "the tokenizer has neither a chat template nor a token that begins a text; "
                "give prompts (--prompts)"
            )
        return UserPrefix([first], (), ("\n\n",))
    message = {"role": "user", "content": _MARK}
    try:
        rendered = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise what they like, by way of jinja
        raise ConfigError(f"the chat template refuses a user's turn: {error}") from None
    before, found, after = rendered.partition(_MARK)
    if not found or not before:
        raise ConfigError(
            "the chat template shows no prefix before a user's turn; give prompts (--prompts)"
        )
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    behind = tokenizer(after, add_special_tokens=False)["input_ids"]
    if behind and behind[0] in tokenizer.all_special_ids:
        return UserPrefix(ids, (behind[0],), ())
    line = next((line for line in after.splitlines() if line.strip()), None)
    if line is None:
        raise ConfigError(
            "the chat template shows nothing behind a user's turn; give prompts (--prompts)"
        )
    return UserPrefix(ids, (), (line.strip(),))


def clean_turn(text: str, *, ended: bool) -> str | None:
    """The turn to keep, or None: too short, broken characters, or cut off in the middle."""
    text = text.strip()
    if not ended or len(text) < _SHORTEST or "\ufffd" in text or "\x00" in text:
        return None
    return text


def likeness(text: str) -> str:
    """Equal for turns that differ only in case, punctuation and blanks."""
    return " ".join(re.findall(r"\w+", text.casefold())) or text


class SynthesisFile:
    """A prompt file that knows how far it got: one {"prompt": ..., "try": ...} a line."""

    def __init__(self, path: Path, *, target: str, seed: int) -> None:
        """Opens or creates `path`. DataError if it holds anything else, another target's turns or
        another seed's."""
        self.path, self.target, self.seed = path, target, seed
        self.tries = 0
        """The first try whose result is not known to be here."""
        self._seen: set[str] = set()
        if path.exists():
            for number, line in enumerate(whole_lines(path, begin=b'{"prompt": '), start=1):
                self._read(line, f"{path}, line {number}")
            cut_torn_line(path)

    def __len__(self) -> int:
        return len(self._seen)

    def append(self, turns: Sequence[tuple[int, str]], most: int) -> int:
        """Adds (try, turn) pairs, ascending, that are like none before, as far as `most` in all;
        how many were added."""
        lines: list[str] = []
        fresh: list[str] = []
        for number, turn in turns:
            like = likeness(turn)
            if like in self._seen or like in fresh or len(self) + len(fresh) >= most:
                continue
            fresh.append(like)
            record = {"prompt": turn, "target": self.target, "seed": self.seed, "try": number}
            lines.append(json.dumps(record, ensure_ascii=False))
        append_lines(self.path, lines, before=f"{len(self)} prompts")
        self._seen.update(fresh)
        return len(fresh)

    def _read(self, line: bytes, where: str) -> None:
        try:
            record = json.loads(line)
            turn, number = record["prompt"], int(record["try"])
            origin = record["target"], record["seed"]
            if not isinstance(turn, str) or number < 0:
                raise ValueError(turn)
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{where}: not a synthesised prompt; give another file") from None
        if origin != (self.target, self.seed):
            raise DataError(
                f"{where}: written by {origin[0]} with seed {origin[1]}, not {self.target} with "
                f"seed {self.seed}; give another file"
            )
        self._seen.add(likeness(turn))
        self.tries = number + 1
