"""What every benchmark says about where it ran."""

import ctypes
import datetime
import json
import platform
from pathlib import Path

import torch


def keep_large_blocks() -> str:
    """Tells glibc to serve large blocks from the heap and never to give it back; returns what holds.

    With the default each large temporary costs page faults, which are then most of what is measured.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, top_pad, mmap_max = -1, -2, -4  # M_* in malloc.h
        done = libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, 2**31 - 1) and libc.mallopt(top_pad, 2**26)
    except (OSError, AttributeError):
        done = 0
    return "glibc, large blocks kept" if done else "default"


def describe(device: str = "cpu") -> str:
    """Hardware, threads, date and version in one line."""
    if device == "cpu":
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        hardware = f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"
    else:
        hardware = torch.cuda.get_device_name()
    return f"{hardware}; {datetime.date.today()}; torch {torch.__version__}"


def save(path: str | None, numbers: dict[str, float]) -> None:
    """Writes the numbers of a run, with where they were measured; nothing without a path."""
    if path is not None:
        Path(path).write_text(json.dumps({"where": describe(), "numbers": numbers}, indent=1))
