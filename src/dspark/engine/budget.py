"""How much memory keys and values may take."""

from pathlib import Path

import psutil
import torch

from dspark.core.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


def budget_tokens(
    bytes_per_token: int, *, share: float, most_tokens: int, device: torch.device
) -> int:
    """Tokens that fit into `share` of the memory that is free now, at most `most_tokens`.

    Raises ConfigError where that is none.
    """
    free = free_bytes(device)
    tokens = min(int(free * share) // bytes_per_token, most_tokens)
    if tokens < 1:
        raise ConfigError(
            f"{share:.0%} of {free / 2**30:.1f} GiB of free memory hold no keys and values "
            f"({bytes_per_token} bytes a token); free some, or raise memory_share"
        )
    return tokens


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free; on a CPU the container's limit counts, too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _read(path: Path) -> int | None:
    """The number in a control file; None where there is none, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
