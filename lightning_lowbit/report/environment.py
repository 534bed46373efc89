"""Where a run ran: versions, devices, memory."""

import importlib.metadata
import platform
import re
import shlex
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from lightning_lowbit._lightning import Trainer


def environment(trainer: Trainer, started: datetime) -> dict[str, Any]:
    """What a reader needs to know to run it again."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "lightning", "lightning_lowbit", "transformers", "datasets"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    device = trainer.strategy.root_device
    return {
        "started": started.isoformat(" ", "seconds"),
        "command": shlex.join(sys.argv),
        **versions,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processes": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "CPU": _cpu_name(),
        "threads": torch.get_num_threads(),
        "operating system": platform.platform(),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def peak_memory(device: torch.device) -> int | None:
    """Bytes that this process had at most: of the GPU's memory, or of the machine's where it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
