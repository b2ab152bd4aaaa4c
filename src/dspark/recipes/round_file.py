"""Rounds of full blocks, kept text by text: append-only, resumable.

A file is jsonl. Its first line says how the rounds came about; every further line is one text:

    {"file": "gsm8k", "line": 12, "sample": 0, "rounds": [
        [accepted, judged, [logit, ...], [entropy, ...]], ...]}

A process killed in the middle of a write leaves a torn last line: it is dropped when the file is
opened again. Anything else that is wrong is an error with the file and line.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.core.errors import DataError

FORMAT = "dspark-rounds/2"
_WITHOUT_ENTROPY = "dspark-rounds/1"

TextKey = tuple[str, int, int]
"""(prompt file stem, 1-based line, sample)."""

RoundRow = tuple[int, int, tuple[float, ...], tuple[float, ...]]
"""Accepted and judged positions, the block's raw confidence logits, and its entropies in nats."""


class RoundFile:
    """One file of rounds, open for reading and appending by one process."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Opens or creates `path`; `settings` name the "block_size" among others. DataError if it
        was written under other settings, or holds what no round of such blocks can be."""
        self.path = path
        self._block_size = settings["block_size"]
        self.texts: dict[TextKey, tuple[RoundRow, ...]] = {}
        self._header = {"format": FORMAT, **settings}
        if path.exists():
            self._load()
        if not path.exists() or path.stat().st_size == 0:
            self._write(json.dumps(self._header))

    def append(self, key: TextKey, rounds: Sequence[RoundRow]) -> None:
        """Adds a text that is not there yet, durably."""
        assert key not in self.texts, key
        file, line, sample = key
        # Nine digits are a float32 exactly.
        rows = [
            [a, j, *([float(f"{x:.9g}") for x in values] for values in evidence)]
            for a, j, *evidence in rounds
        ]
        record = {"file": file, "line": line, "sample": sample, "rounds": rows}
        self._write(json.dumps(record, separators=(",", ":")))
        self.texts[key] = tuple(rounds)

    def _write(self, line: str) -> None:
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                record = json.loads(line)
                if number > 1:
                    key = record["file"], record["line"], record["sample"]
                    self.texts[key] = tuple(
                        _checked(a, j, tuple(logits), tuple(entropies), self._block_size)
                        for a, j, logits, entropies in record["rounds"]
                    )
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self.path}, line {number}: not the rounds of a text ({error}); delete it"
                ) from None
            if number == 1:
                self._check_header(record)
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))

    def _check_header(self, header: Any) -> None:
        if isinstance(header, dict) and header.get("format") == _WITHOUT_ENTROPY:
            raise DataError(
                f"{self.path} holds rounds without the draft's entropies, which an older version "
                "wrote and no fit can do without; give another --run folder"
            )
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise DataError(f"{self.path} is not a file of rounds ({FORMAT})")
        for key, ours in self._header.items():
            if header.get(key) != ours:
                raise DataError(
                    f"{self.path} was written with {key} {header.get(key)}, not {ours}; "
                    "give another --run folder"
                )


def _checked(
    accepted: Any, judged: Any, logits: tuple[Any, ...], entropies: tuple[Any, ...], slots: int
) -> RoundRow:
    """ValueError for what is no round of a block of `slots`."""
    counts = [accepted, judged]
    if not all(type(count) is int for count in counts) or not 0 <= accepted <= judged <= slots:
        raise ValueError(f"{accepted} of {judged} accepted")
    for values in (logits, entropies):
        if len(values) != slots or not all(
            type(value) in (int, float) and math.isfinite(value) for value in values
        ):
            raise ValueError(f"not {slots} finite numbers: {list(values)}")
    return accepted, judged, logits, entropies
