"""Reading and writing draft bundles: DeepSpec's dialect plus a `dspark` block in `config.json`.

config.json                DeepSpec's keys, and `dspark`: what they leave out
model.safetensors          DeepSpec's tensor names, full vocabulary, without the target's tables
draft_tokens.safetensors   optional: the draft vocabulary
README.md                  the model card
"""

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.checkpoints.bundle import Bundle, BundleInfo
from dspark.checkpoints.deepspec import from_deepspec, to_deepspec
from dspark.checkpoints.lint import TARGET_COPIES, lint_shapes, lint_values, refuse
from dspark.core.errors import CheckpointError
from dspark.drafters.config import DraftConfig

CONFIG, WEIGHTS, DRAFT_TOKENS, CARD = (
    "config.json", "model.safetensors", "draft_tokens.safetensors", "README.md",
)  # fmt: skip
_REPLACEABLE = {
    CONFIG, WEIGHTS, DRAFT_TOKENS, CARD, "calibration.json", "calibration.sglang.json",
    "calibration.tensorrt-llm.json", "cost_table.json",
}  # fmt: skip


def write_bundle(
    folder: Path,
    *,
    config: DraftConfig,
    info: BundleInfo,
    tensors: Mapping[str, Tensor],
    card: str,
    dtype: torch.dtype | None = torch.float16,
    draft_token_ids: Tensor | None = None,
) -> None:
    """Writes a bundle folder, whole or not at all.

    `tensors` is a `DraftModel.state_dict()`; `dtype` None stores tensors as they are. An older
    bundle at `folder` is replaced, its calibration included (it belonged to the old weights).
    CheckpointError if the tensors do not fit the config, are not finite in `dtype`, or the folder
    holds anything else.
    """
    folder = Path(folder)
    stored = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in tensors.items()
        if name not in TARGET_COPIES
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    refuse(f"cannot write {folder}", lint_shapes(config, shapes) + lint_values(stored))
    if draft_token_ids is not None:
        _check_draft_tokens(f"cannot write {folder}", draft_token_ids, config)
    info = replace(info, draft_vocabulary=None if draft_token_ids is None else len(draft_token_ids))
    check_replaceable(folder)

    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in stored.values()}
    keys = to_deepspec(config, dtypes.pop() if len(dtypes) == 1 else "float32")
    keys["dspark"] = info.to_json()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        staging.chmod(0o755)  # mkdtemp's 0o700 would shut other users out of the bundle
        save_file(stored, staging / WEIGHTS, metadata={"format": "pt"})
        if draft_token_ids is not None:
            ids = draft_token_ids.to("cpu", torch.int64).contiguous()
            save_file({"draft_token_ids": ids}, staging / DRAFT_TOKENS)
        (staging / CARD).write_text(card, encoding="utf-8")
        (staging / CONFIG).write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
        _swap(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_bundle(folder: Path) -> Bundle:
    """Reads a native or DeepSpec folder; a one-line CheckpointError for anything wrong with it."""
    folder = Path(folder)
    config, info = read_config(folder)
    tensors = _read_tensors(folder / WEIGHTS)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    refuse(folder / WEIGHTS, lint_shapes(config, shapes) + lint_values(tensors))
    copies = {name: tensors.pop(name) for name in TARGET_COPIES if name in tensors}
    return Bundle(folder, config, info, tensors, copies, _read_draft_tokens(folder, config, info))


def read_config(folder: Path) -> tuple[DraftConfig, BundleInfo | None]:
    """What `read_bundle` says of the drafter, without its weights."""
    if not folder.is_dir():
        raise CheckpointError(f"draft bundle {folder}: no such folder")
    keys = _read_keys(folder)
    try:
        config = from_deepspec(keys)
        return config, BundleInfo.from_json(keys["dspark"]) if "dspark" in keys else None
    except CheckpointError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error


def _read_keys(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"draft bundle {folder}: cannot read {CONFIG} ({error.strerror})"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(keys, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return keys


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no __iter__)
    except FileNotFoundError as error:
        raise CheckpointError(f"draft bundle {path.parent}: no {path.name}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or not safetensors ({error})") from error


def _read_draft_tokens(folder: Path, config: DraftConfig, info: BundleInfo | None) -> Tensor | None:
    size = None if info is None else info.draft_vocabulary
    if size is None:
        return None
    path = folder / DRAFT_TOKENS
    tensors = _read_tensors(path)
    if set(tensors) != {"draft_token_ids"}:
        raise CheckpointError(f"{path}: must hold exactly draft_token_ids, has {sorted(tensors)}")
    ids = tensors["draft_token_ids"]
    _check_draft_tokens(path, ids, config)
    if len(ids) != size:
        raise CheckpointError(f"{path}: has {len(ids)} ids, config.json says {size}")
    return ids


def _check_draft_tokens(where: object, ids: Tensor, config: DraftConfig) -> None:
    ok = ids.dtype == torch.int64 and ids.ndim == 1 and len(ids) > 0
    ok = (
        ok
        and bool((ids[1:] > ids[:-1]).all())
        and int(ids[0]) >= 0
        and int(ids[-1]) < config.vocab_size
    )
    if not ok:
        raise CheckpointError(
            f"{where}: draft_token_ids must be ascending int64 ids below {config.vocab_size}"
        )


def check_replaceable(folder: Path) -> None:
    """CheckpointError where `write_bundle` would not write: a file, or a folder of other things."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"cannot write {folder}: it is a file; give a folder")
    foreign = sorted({item.name for item in folder.iterdir()} - _REPLACEABLE)
    if foreign:
        raise CheckpointError(
            f"cannot write {folder}: it holds {', '.join(foreign[:3])}, which no bundle has; "
            "give a new folder or an older bundle"
        )


def _swap(staging: Path, folder: Path) -> None:
    """Puts `staging` in the place of `folder`; the old one is kept until the new one is there."""
    if not folder.exists():
        staging.rename(folder)
        return
    if _exchange(staging, folder):  # the old one is removed as what is left of the staging
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.replace(old)  # an empty folder may be replaced
    try:
        staging.rename(folder)
    except BaseException:  # Ctrl-C, too
        old.replace(folder)
        raise
    shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step, where the system can (Linux): then a process killed at any
    moment leaves one bundle or the other. With two renames there is a moment with none."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)
