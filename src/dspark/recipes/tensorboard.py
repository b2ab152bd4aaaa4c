"""The lines of `metrics.jsonl` as curves in TensorBoard."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.core.errors import MissingExtraError


@contextmanager
def board(folder: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Records a line of metrics in `folder/tensorboard`; without a folder, nowhere.

    Raises MissingExtraError where tensorboard is not installed.
    """
    if folder is None:
        yield lambda metrics: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtraError("tensorboard", "train") from None
    writer: Any = SummaryWriter(str(folder / "tensorboard"))
    try:
        yield lambda metrics: _record(writer, metrics, metrics["step"])
    finally:
        writer.close()


def _record(writer: Any, metrics: Mapping[str, Any], step: int, prefix: str = "train") -> None:
    for name, value in metrics.items():
        if name == "validation":
            _record(writer, value, step, name)
        elif isinstance(value, list):
            for slot, number in enumerate(value):
                writer.add_scalar(f"{prefix}/{name}/slot{slot}", number, step)
        elif name != "step":
            writer.add_scalar(f"{prefix}/{name}", value, step)
