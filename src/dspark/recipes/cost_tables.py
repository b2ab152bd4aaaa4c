"""The user's cost tables, found again under the fingerprint of what they hold for."""

import hashlib
import json
import os
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

from dspark.core.errors import DataError
from dspark.engine.config import EngineConfig
from dspark.recipes.bundles import LOOKUP
from dspark.scheduling.table import CostTable, Fingerprint, differences, read_table, table_name
from dspark.targets.load import LoadedTarget
from dspark.targets.source import cache_folder


def fingerprint_of(
    loaded: LoadedTarget,
    drafter: str | None,
    *,
    block_size: int | None = None,
    graphs: bool = False,
    many_requests: bool = False,
) -> Fingerprint:
    """What a cost table of this target and drafter, in this process, depends on.

    drafter: `drafter_id` of its bundle; None is prompt lookup.
    block_size: of a drafter that is cut short.
    graphs, many_requests: as in `LLM`; either way has tables of its own.
    """
    drafter = drafter or LOOKUP
    if block_size is not None:
        drafter += f", blocks of {block_size}"
    return {
        "processor": _processor(loaded.target.device),
        "threads": str(torch.get_num_threads()),
        "weights": f"{loaded.weights}{', for many requests' if many_requests else ''}",
        "cache": EngineConfig().cache_dtype,
        "target": f"{loaded.name} {loaded.binding.embedding_hash[:16]}",
        "drafter": f"{drafter}{', in CUDA graphs' if graphs else ''}",
        "versions": f"dspark {version('dspark')}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }


def drafter_id(bundle: Path) -> str:
    """A name for a bundle's weights and settings."""
    digest = hashlib.sha256()
    for file in [bundle / "config.json", *sorted(bundle.glob("*.safetensors"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def table_path(fingerprint: Fingerprint) -> Path:
    return cache_folder() / "cost_tables" / table_name(fingerprint)


def find_table(fingerprint: Fingerprint) -> CostTable | None:
    """The table measured for just this; None where there is none.

    Raises DataError for a file of that name that is broken or holds another machine's table.
    """
    path = table_path(fingerprint)
    return read_table(path, fingerprint) if path.is_file() else None


def why_none(fingerprint: Fingerprint) -> str:
    """Why no table is found, for people: there is none, or one of other circumstances."""
    for path in sorted(table_path(fingerprint).parent.glob("*.json"), reverse=True):
        try:
            table = CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, DataError):
            continue  # not ours to judge: it has another name than the one that is wanted
        there = table.fingerprint
        if all(there.get(key) == fingerprint[key] for key in ("target", "drafter")):
            return f"the one there is was measured elsewhere: {differences(there, fingerprint)}"
    return "none has been measured yet"


def save_table(table: CostTable) -> Path:
    """Writes the table where `find_table` looks, in one step."""
    path = table_path(table.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(table.to_json(), file)
    Path(file.name).replace(path)
    return path


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {os.cpu_count()} processors, {capability}"
