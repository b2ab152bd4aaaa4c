"""`calibration.json`: what was fitted for a draft bundle, by condition."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark.calibration.condition import CandidateSet, Condition
from dspark.calibration.confidence import Scaling, check_block_size
from dspark.core.errors import CheckpointError, ConfigError
from dspark.core.sampling import SamplingParams

FILE = "calibration.json"
_PER_POSITION = ("ece_before", "ece_temperature_alone", "ece_after")
"""What exports and reports read of every position."""
_VECTORS = ("temperatures", "offsets", "entropy_weights", "temperatures_alone", "mean_survival")
FORMAT_VERSION = 3
"""3: entropy weights beside temperatures and offsets."""
_LONGEST_BLOCK = 4096
_WITHOUT_ENTROPY = 2
"""The format before: read as weights of 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What was fitted for one condition."""

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    entropy_weights: tuple[float, ...]
    """[K] each; the three are what the engine uses together (`confidence.Scaling`)."""
    temperatures_alone: tuple[float, ...]
    """[K], the paper's calibration: for engines that only divide."""
    mean_survival: tuple[float, ...]
    """[K] shares of prefixes accepted: what to expect of a request that nothing is known of."""
    positions: tuple[dict[str, Any], ...]
    """`PositionReport`s of held-out rounds."""
    rounds_fitted: int
    rounds_held_out: int
    prompts_fitted: int
    prompts_held_out: int
    command: str
    """How it was made."""
    data_sha256: str
    """Of the rounds that it was fitted and measured on."""

    @property
    def scaling(self) -> Scaling:
        return Scaling(
            np.array(self.temperatures), np.array(self.offsets), np.array(self.entropy_weights)
        )

    @property
    def has_entropy(self) -> bool:
        """False for one that was fitted before calibration knew of entropy."""
        return any(self.entropy_weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationTable:
    """Everything in a `calibration.json`."""

    block_size: int
    weights_sha256: str
    """Of the `model.safetensors` whose confidences it calibrates."""
    entries: Mapping[Condition, Entry] = field(default_factory=dict)

    @property
    def scalings(self) -> dict[Condition, Scaling]:
        """[K] per condition."""
        return {condition: entry.scaling for condition, entry in self.entries.items()}

    def with_entry(self, condition: Condition, entry: Entry) -> "CalibrationTable":
        """This table, with one condition added or replaced."""
        return replace(self, entries={**self.entries, condition: entry})

    def to_json(self) -> dict[str, Any]:
        conditions = [
            {**condition.to_json(), **_plain(entry)} for condition, entry in self.entries.items()
        ]
        default = [e.positions for c, e in self.entries.items() if c.is_default]
        return {
            "format_version": FORMAT_VERSION,
            "block_size": self.block_size,
            "weights_sha256": self.weights_sha256,
            "positions": [*default[0]] if default else None,
            "conditions": conditions,
        }


def write_table(table: CalibrationTable, path: Path) -> None:
    """Writes the file whole or not at all; CheckpointError where it cannot be written."""
    text = json.dumps(table.to_json(), indent=1, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path} ({error.strerror})") from error


def read_table(path: Path, *, block_size: int, weights_sha256: str) -> CalibrationTable:
    """Reads and checks a calibration; a one-line CheckpointError for anything wrong with it.

    block_size, weights_sha256: the drafter's, which must be those that it was made for.
    """
    try:
        table = _parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror})") from error
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a calibration ({error}); calibrate this bundle again, or delete the file"
        ) from error
    if table.block_size != block_size:
        raise CheckpointError(
            f"{path}: fitted for blocks of {table.block_size}, the drafter's block is "
            f"{block_size}; calibrate this bundle again, or delete the file"
        )
    if table.weights_sha256 != weights_sha256:
        raise CheckpointError(
            f"{path}: fitted for weights with hash {table.weights_sha256[:12]}, the bundle's are "
            f"{weights_sha256[:12]}; calibrate this bundle again, or delete the file"
        )
    return table


def file_sha256(path: Path) -> str:
    """CheckpointError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror})") from error


def writable(path: Path) -> bool:
    """Whether `write_table` could write there: known before the long work."""
    return path.parent.is_dir() and os.access(path.parent, os.W_OK)


def _plain(entry: Entry) -> dict[str, Any]:
    return {item.name: _listed(getattr(entry, item.name)) for item in fields(entry)}


def _listed(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


def _parse(document: Any) -> CalibrationTable:
    version = document.get("format_version") if isinstance(document, dict) else None
    if type(version) is not int or version not in (FORMAT_VERSION, _WITHOUT_ENTROPY):
        raise ValueError(f"format_version must be {FORMAT_VERSION} or {_WITHOUT_ENTROPY}")
    block_size, weights = document["block_size"], document["weights_sha256"]
    if type(block_size) is not int or not 1 <= block_size <= _LONGEST_BLOCK:
        raise ValueError(f"block_size must be a whole number in 1..{_LONGEST_BLOCK}")
    if not isinstance(weights, str):
        raise ValueError("weights_sha256 must be a string")
    if not isinstance(document["conditions"], list) or not document["conditions"]:
        raise ValueError("conditions must be a list with at least one entry")
    entries: dict[Condition, Entry] = {}
    for record in document["conditions"]:
        if version == _WITHOUT_ENTROPY and isinstance(record, dict):
            if "entropy_weights" in record:
                raise ValueError(f"format_version {version} has no entropy_weights")
            record = {**record, "entropy_weights": [0.0] * block_size}
        condition, entry = _parse_condition(record, block_size)
        if condition in entries:
            raise ValueError(f"the condition '{condition}' is there twice")
        entries[condition] = entry
    return CalibrationTable(block_size=block_size, weights_sha256=weights, entries=entries)


def _parse_condition(record: Any, block_size: int) -> tuple[Condition, Entry]:
    if not isinstance(record, dict):
        raise ValueError("a condition must be an object")
    for name in _VECTORS:
        _check_numbers(record[name], name, block_size)
    for name in _PER_POSITION:
        _check_numbers(
            [row[name] for row in record["positions"]], f"{name} of positions", block_size
        )
    record = {key: tuple(v) if isinstance(v, list) else v for key, v in record.items()}
    own = [item.name for item in fields(Condition)]
    entry = Entry(**{key: value for key, value in record.items() if key not in own})
    proposals = CandidateSet(record["candidates"], record["draft_vocabulary"])
    for name, count in asdict(proposals).items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be at least 1")
    sampling = SamplingParams(
        verification=record["rule"], **{key: record[key] for key in own[1:-2]}
    )
    condition = Condition.of(sampling, proposals)
    check_block_size(entry.scaling, block_size)
    check_block_size(Scaling.of_temperatures(entry.temperatures_alone), block_size)
    survival = np.asarray(entry.mean_survival, dtype=np.float64)
    if survival.shape != (block_size,) or not ((survival >= 0) & (survival <= 1)).all():
        raise ValueError(f"mean_survival must hold {block_size} shares")
    return condition, entry


def _check_numbers(values: Any, name: str, count: int) -> None:
    numbers = isinstance(values, list) and all(type(v) in (int, float) for v in values)
    if not numbers or len(values) != count:
        raise ValueError(f"{name} must hold {count} numbers")
