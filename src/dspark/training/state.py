"""The state of a run on disk: everything a resumed run needs to continue bit for bit.

Two generations: a new state is written whole beside the old one and takes its name by a rename, so
that at any moment at least one of `state.safetensors` and `state.previous.safetensors` is complete.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dspark.core.errors import DataError

_NAMES = ("state.safetensors", "state.previous.safetensors")


@dataclass(frozen=True, slots=True)
class RunState:
    tensors: dict[str, Tensor]
    """Weights and optimiser moments, float32."""
    numbers: dict[str, Any]
    """Step, cursor, seconds, configuration; JSON."""


def save_state(folder: Path, state: RunState) -> None:
    current, previous = (folder / name for name in _NAMES)
    partial = folder / "state.partial"
    with partial.open("wb") as file:
        file.write(save(state.tensors, metadata={"numbers": json.dumps(state.numbers)}))
        file.flush()
        os.fsync(file.fileno())
    if current.exists():
        current.replace(previous)
    partial.replace(current)


def load_state(folder: Path) -> RunState | None:
    """The newest complete state; None if there is none. DataError if what there is is damaged."""
    found = [folder / name for name in _NAMES if (folder / name).exists()]
    for path in found:
        try:
            with safe_open(path, "pt") as file:
                numbers = json.loads(file.metadata()["numbers"])
                return RunState({name: file.get_tensor(name) for name in file.keys()}, numbers)  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            continue
    if found:
        raise DataError(f"{found[0]} is damaged and cannot be resumed; start another run folder")
    return None
