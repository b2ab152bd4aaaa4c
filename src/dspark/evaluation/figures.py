"""Files of figures: checked before the long work, written after it."""

from pathlib import Path
from typing import Any

from dspark.core.errors import ConfigError, DataError, MissingExtraError

_SUFFIXES = (".png", ".svg", ".pdf")


def check_figure(path: Path) -> None:
    """ConfigError for an ending that cannot be drawn, MissingExtraError without matplotlib."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"cannot draw {path.name!r}; the file must end in {', '.join(_SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtraError("matplotlib", "plots") from None


def save_figure(figure: Any, path: Path) -> None:
    """Writes a matplotlib figure; DataError where that fails."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise DataError(f"cannot draw {path}: {error}") from error
