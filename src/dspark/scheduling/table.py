"""A machine's cost table as a file: measured medians under the fingerprint of what was measured."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.core.errors import DataError
from dspark.scheduling.cost import LARGEST_BATCH
from dspark.scheduling.fit import DraftCell, Fit, StepCell, fit_cost

Fingerprint = dict[str, str]
"""What the numbers depend on: processor, threads, weights, target, drafter, versions."""

_FORMAT = 2
_LEAST_MS, _MOST_MS = 1e-9, 1e9
"""What nothing takes: a broken file."""


@dataclass(frozen=True, slots=True)
class CostTable:
    fingerprint: Fingerprint
    steps: tuple[StepCell, ...]
    drafts: tuple[DraftCell, ...]

    def fit(self) -> Fit:
        return fit_cost(self.steps, self.drafts)

    def to_json(self) -> dict[str, Any]:
        """The keys of `dspark profile --json`; times are milliseconds."""
        return {
            "format_version": _FORMAT,
            "fingerprint": self.fingerprint,
            "verify": [
                {
                    "batch_tokens": cell.batch_tokens,
                    "requests": cell.requests,
                    "context_length": cell.context_length,
                    "milliseconds": 1000 * cell.forward,
                    "rest_milliseconds": 1000 * cell.rest,
                }
                for cell in self.steps
            ],
            "draft": [
                {
                    "requests": cell.requests,
                    "length": cell.length,
                    "context_length": cell.context_length,
                    "milliseconds": 1000 * cell.seconds,
                }
                for cell in self.drafts
            ],
        }

    @classmethod
    def from_json(cls, document: object, where: str = "the cost table") -> "CostTable":
        """Raises DataError for anything that a profile would not have written."""
        if not isinstance(document, dict) or document.get("format_version") != _FORMAT:
            raise DataError(f"{where} is no cost table of format {_FORMAT}; profile again")
        fingerprint = document.get("fingerprint")
        if not isinstance(fingerprint, dict) or not all(
            isinstance(item, str) for pair in fingerprint.items() for item in pair
        ):
            raise DataError(f"{where} has no fingerprint of names and values; profile again")
        verify, draft = _rows(document, "verify", where), _rows(document, "draft", where)
        return cls(
            fingerprint,
            tuple(
                StepCell(
                    batch_tokens=_count(row, "batch_tokens", where),
                    requests=_count(row, "requests", where),
                    context_length=_count(row, "context_length", where),
                    forward=_seconds(row, "milliseconds", where),
                    rest=_seconds(row, "rest_milliseconds", where),
                )
                for row in verify
            ),
            tuple(
                DraftCell(
                    requests=_count(row, "requests", where),
                    length=_count(row, "length", where),
                    context_length=_count(row, "context_length", where),
                    seconds=_seconds(row, "milliseconds", where),
                )
                for row in draft
            ),
        )


def read_table(path: Path, here: Fingerprint) -> CostTable:
    """The table of a file. Raises DataError for a broken one and for one measured elsewhere."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"cannot read the cost table {path}: {error}; profile again") from error
    table = CostTable.from_json(document, f"the cost table {path}")
    if other := differences(table.fingerprint, here):
        raise DataError(
            f"the cost table {path} was measured elsewhere ({other}); run dspark profile here"
        )
    return table


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """What two fingerprints differ in, for people; empty when they are the same."""
    keys = [key for key in {**here, **there} if there.get(key) != here.get(key)]
    return ", ".join(f"{key} {there.get(key, '-')}, here {here.get(key, '-')}" for key in keys)


def table_name(fingerprint: Fingerprint) -> str:
    """A file name that only this fingerprint has, in this format: older ones are not looked at."""
    text = json.dumps({"format": str(_FORMAT), **fingerprint}, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _rows(document: Mapping[str, Any], key: str, where: str) -> list[Any]:
    rows = document.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise DataError(f"{where} has no {key} measurements; profile again")
    return rows


def _count(row: Mapping[str, Any], key: str, where: str) -> int:
    value = row.get(key)
    if type(value) is not int or not 1 <= value <= LARGEST_BATCH:
        raise DataError(
            f"{where} has {key} {value!r}; it must be a whole number in 1..{LARGEST_BATCH}"
        )
    return value


def _seconds(row: Mapping[str, Any], key: str, where: str) -> float:
    value = row.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not number or not _LEAST_MS < value < _MOST_MS:
        raise DataError(f"{where} has {key} {value!r}; times must be positive and finite")
    return float(value) / 1000
