"""Files of lines that grow by appending: nothing that was written is ever lost or torn."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from dspark.core.errors import DSparkError


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


def whole_lines(path: Path, *, cut: bool = True) -> list[bytes]:
    """Its lines without a torn last one, which a process killed in the middle of a write leaves.

    cut: the file loses it, too. Not for who only reads: another process may be writing it now.
    """
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if cut and len(whole) < len(data):
        os.truncate(path, len(whole))
    return whole.split(b"\n")[:-1]
