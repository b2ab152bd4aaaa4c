"""What processes that torchrun started say: all of them meet most errors, one of them tells."""

import hashlib
import os
from datetime import timedelta

_PATIENCE = timedelta(seconds=10)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def told_by_another(line: str) -> bool:
    """Whether another rank tells this very line.

    They have nothing but torchrun's own store in common, which outlives them all. Where it cannot
    be asked, a line is better told twice than never.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    from torch.distributed import DistError, TCPStore

    digest = hashlib.sha256(line.encode()).hexdigest()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, is_master=False, timeout=_PATIENCE, wait_for_workers=False)
        return store.add(f"dspark/told/{attempt}/{digest}", 1) > 1
    except (KeyError, ValueError, RuntimeError, DistError):
        return False
