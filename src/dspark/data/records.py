"""Numbered records of a prompt file: jsonl, parquet, or a Hugging Face dataset on disk."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dspark.core.errors import DataError, MissingExtraError

SUFFIXES = (".jsonl", ".parquet")
_ROWS = 1024
"""Rows of a parquet file in memory at once."""

Record = tuple[int, Any]
"""(1-based line or row, the record: whatever JSON held, or why the line is none as a DataError)."""


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The files of these paths, in order; a dataset that `save_to_disk` wrote counts as one.

    Raises DataError for a missing path, a file of another kind and a folder without any.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            # A pipe or a temporary file has no suffix to go by: jsonl is what it may hold.
            if path.suffix not in SUFFIXES and path.suffix in (".json", ".csv", ".txt", ".arrow"):
                raise DataError(f"{path} is not {' or '.join(SUFFIXES)}; convert it")
            files.append(path)
        elif _is_dataset(path):
            files.append(path)
        elif path.is_dir():
            found = sorted(
                entry
                for entry in path.iterdir()
                if _is_dataset(entry) or (entry.is_file() and entry.suffix in SUFFIXES)
            )
            if not found:
                raise DataError(f"{path} holds no .jsonl or .parquet file and no saved dataset")
            files += found
        else:
            raise DataError(f"there is no prompt file or folder {path}")
    return files


def read_records(file: Path) -> Iterator[Record]:
    """Every record with its number. DataError for a file that cannot be read at all."""
    if file.is_dir():
        return _dataset(file)
    return _parquet(file) if file.suffix == ".parquet" else _jsonl(file)


def _jsonl(file: Path) -> Iterator[Record]:
    # Bytes are split at "\n" alone: str.splitlines would also cut at U+2028 and its kind inside a
    # JSON string.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _parse(line, f"{file}, line {number}")


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return DataError(f"{where}: not UTF-8 (byte {error.start} of the line); convert the file")
    except json.JSONDecodeError as error:
        return DataError(f"{where}: not JSON ({error.msg}, column {error.colno})")
    except RecursionError:
        return DataError(f"{where}: not JSON that can be read (nested too deeply)")


def _parquet(file: Path) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "datasets") from None
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not a parquet file that can be read, after row {number} ({error})"
        ) from None


def _is_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _dataset(folder: Path) -> Iterator[Record]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "datasets") from None
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # datasets passes on whatever pyarrow and json raise
        raise DataError(f"{folder}: not a dataset that can be read ({error})") from None
    if isinstance(loaded, datasets.DatasetDict):
        raise DataError(
            f"{folder} holds several splits; name one: "
            + ", ".join(str(folder / split) for split in loaded)
        )
    yield from enumerate(loaded, start=1)
