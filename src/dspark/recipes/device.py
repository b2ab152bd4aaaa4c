"""What can be asked of the device that work runs on: its name, the time, and its memory."""

import sys
import time
from collections.abc import Callable

import psutil
import torch


def describe(device: torch.device) -> str:
    """For people: cpu, or cuda:0 (its name)."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def clock_of(device: torch.device) -> Callable[[], float]:
    """Wall time with everything done that was asked of the device."""
    if device.type != "cuda":
        return time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized


def peak_bytes(device: torch.device) -> int:
    """What this process has taken of the device's memory at most so far; now, where the system does
    not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    try:
        import resource
    except ImportError:  # Windows
        return int(psutil.Process().memory_info().rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
