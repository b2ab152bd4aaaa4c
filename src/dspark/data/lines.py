"""Files of lines that grow by appending: nothing that was written is ever lost or torn."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from dspark.core.errors import DataError, DSparkError


def append_lines(path: Path, lines: Sequence[str], *, before: str) -> None:
    """Adds the lines durably, all or none.

    before: what the file holds already, for the error that a full disk raises.
    """
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write("".join(line + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # A full disk takes the first lines only: none of them counts, all that stood before do.
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise DSparkError(
            f"{path}: {error.strerror}; the {before} written before are whole: make room, then run "
            f"the same command again"
        ) from error


def whole_lines(path: Path, *, begin: bytes) -> list[bytes]:
    """Its lines without a torn last one, which a process killed in the middle of a write leaves.

    begin: what the first line of such a file begins with. DataError for another file, which a user
        may have named by mistake: nothing of it may be cut or overwritten.
    """
    data = path.read_bytes()
    if not (data.startswith(begin) or begin.startswith(data)):
        raise DataError(f"{path} holds something else; give another file")
    lines = data.split(b"\n")
    return lines if _is_whole(lines[-1]) else lines[:-1]


def cut_torn_line(path: Path) -> None:
    """Takes a torn last line away. For the one process that writes the file, once its lines have
    been found to be its own."""
    data = path.read_bytes()
    torn = data[data.rfind(b"\n") + 1 :]
    if _is_whole(torn):
        with path.open("ab") as file:
            file.write(b"\n")
    elif torn:
        os.truncate(path, len(data) - len(torn))


def _is_whole(line: bytes) -> bool:
    """An editor, or a user, may have left the last line without its end."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
