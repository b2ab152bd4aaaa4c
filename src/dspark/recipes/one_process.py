"""A folder that one process works in at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.core.errors import DataError

try:
    import fcntl
except ImportError:  # not on Windows, where nobody is kept out
    fcntl = None  # type: ignore[assignment]


@contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """Keeps every other process out of `folder` (created if missing): DataError if one is in it.

    Two writers would append the same responses twice, and neither could be resumed. The lock is the
    kernel's: it ends with the process, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"another process works in {folder}; wait for it, or give another folder"
                ) from None
        yield
