"""The state of a run on disk: everything a resumed run needs to continue bit for bit.

Two generations: a new state is written whole beside the old one and takes its name by a rename, so
that at any moment at least one of `state.safetensors` and `state.previous.safetensors` is complete.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dspark.core.errors import DataError, DSparkError
from dspark.training.ranks import full, like

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
    try:
        with partial.open("wb") as file:
            file.write(save(state.tensors, metadata={"numbers": json.dumps(state.numbers)}))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DSparkError(
            f"{folder}: {error.strerror}; the state saved before is whole: make room, then run the "
            f"same command again"
        ) from error
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


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments, whole and on the CPU: what is written is the same however many ranks
    trained, and on which devices. A tensor in parts is gathered, for which every drafter rank has
    to call this."""
    tensors = {f"model.{name}": full(tensor).cpu() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = full(tensor).cpu()
    return tensors


def restore_weights(model: nn.Module, state: RunState, folder: Path) -> None:
    """DataError if they are another model's."""
    try:
        model.load_state_dict(_under("model.", state.tensors))
    except RuntimeError:
        raise DataError(
            f"{folder} holds a drafter of another shape; start another run folder"
        ) from None


def restore_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: RunState) -> None:
    for name, parameter in model.named_parameters():
        moments = _under(f"optimizer.{name}.", state.tensors)
        if moments:
            optimizer.state[parameter] = {
                key: like(tensor, parameter) for key, tensor in moments.items()
            }


def check_draft_tokens(state: RunState, ours: Tensor | None, folder: Path) -> None:
    """DataError if the run was started with another draft vocabulary."""
    begun = state.tensors.get("draft_token_ids")
    same = begun is ours or (begun is not None and ours is not None and torch.equal(begun, ours))
    if not same:
        raise DataError(
            f"{folder} was started with {_vocabulary(begun)}, not {_vocabulary(ours)}; "
            f"start another run folder"
        )


def _vocabulary(ids: Tensor | None) -> str:
    if ids is None:
        return "no draft vocabulary"
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8]
    return f"a draft vocabulary of {len(ids)} tokens ({digest})"


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
