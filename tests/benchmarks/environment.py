"""What benchmarks share: their options, interleaved rounds, and what they say about where they ran."""

import argparse
import ctypes
import datetime
import json
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_lowbit import convert
from lightning_lowbit.nn import PRESETS, AmaxHistories, LayerKeys

CASTS = [name for name in PRESETS if name != "bf16"]
_K = TypeVar("_K")
_T = TypeVar("_T")


def parser(text: str | None, rounds: int, casts: list[str] | None = None) -> argparse.ArgumentParser:
    """Returns a parser with the options ``--rounds``, ``--json`` and, with a default, ``--casts``."""
    options = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if casts is not None:
        options.add_argument("--casts", nargs="+", default=casts, choices=CASTS, metavar="PRESET")
    options.add_argument("--rounds", type=int, default=rounds)
    options.add_argument("--json")
    return options


def interleaved(calls: Mapping[_K, Callable[[], _T]], rounds: int, warmup: int = 0) -> dict[_K, list[_T]]:
    """Returns the results of rounds of calls, but for the first ones."""
    results: dict[_K, list[_T]] = {name: [] for name in calls}
    for _ in range(warmup + rounds):
        for name, call in calls.items():
            results[name].append(call())
    return {name: values[warmup:] for name, values in results.items()}


def quantized(model: nn.Module, casts: str, device: str = "cpu", backend: str = "auto") -> nn.Module:
    """Converts a model as a plugin does, with keys and the amaxes that delayed scaling reads."""
    LayerKeys(convert(model, casts, backend=backend)).fill_(0, device=torch.device(device))
    AmaxHistories(model).to_(torch.device(device))
    return model


def passes(model: nn.Module, x: Tensor, g: Tensor, *more: object, now: Callable[[], float] = time.perf_counter):
    """Returns the seconds of a forward pass on the CPU, under bf16 autocast, and of its backward pass."""
    start = now()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, *more)
    middle = now()
    y.backward(g)
    return middle - start, now() - middle


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
