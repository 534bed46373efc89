"""What the machine is, which rates it reaches, and what of the package it serves."""

import ctypes
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.nn.native.devices import native_obstacle
from lightning_lowbit.nn.native.table import NATIVE
from lightning_lowbit.quant.call import CastCall
from tests.benchmarks import kernels as benchmarks
from tests.gpu import clock
from tests.gpu.memory import with_memory
from tests.gpu.table import Check, Skipped, Wrong

# Bytes per second of data sheets.
SHEETS = {"H100 PCIe": 2.0e12, "H100": 3.35e12, "H200": 4.8e12, "A100": 2.0e12, "B200": 8.0e12}
PACKAGES = ("torch", "triton", "lightning", "transformers", "numpy", "pytest", "jsonargparse")
QUERY = "driver_version,clocks.max.sm,clocks.sm,clocks.max.mem,power.limit,temperature.gpu,mig.mode.current"
SHARE = 0.6  # of the data sheet, that copies reach at least


def checks(setting):
    device = setting.device
    yield Check("versions", versions, judges=False)
    yield Check("GPU", card, judges=False)
    yield Check("copy", lambda: copies(device))
    yield Check("GEMM", lambda: gemms(device), judges=False)
    yield Check("host time of a launch", lambda: launch(device), judges=False)
    yield Check("kernels run", lambda: kernels(device))
    yield Check("native GEMMs", lambda: {kind: native_obstacle(torch.device(device), kind) or "yes" for kind in NATIVE})


def versions():
    values = {"Python": sys.version.split()[0], "machine": platform.platform(), "CUDA of torch": torch.version.cuda}
    for name in PACKAGES:
        try:
            values[name] = version(name)
        except PackageNotFoundError:
            values[name] = "not installed"
    values["C++ compiler"] = shutil.which("g++") or shutil.which("clang++") or "none"
    return {**values, "CPU threads": torch.get_num_threads(), "cuBLASLt": _cublas()}


def _cublas():
    """The version of the library that this process has loaded."""
    if not torch.cuda.is_available():
        return "none"
    torch.mm(*torch.ones(2, 16, 16, device="cuda"))
    torch.cuda.synchronize()
    maps = Path("/proc/self/maps").read_text()
    path = re.search(r"\S*libcublasLt\.so\S*", maps)
    if path is None:
        return "not found"
    library = ctypes.CDLL(path[0])
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library.cublasLtGetVersion()


def card():
    if not torch.cuda.is_available():
        raise Skipped("needs CUDA")
    properties = torch.cuda.get_device_properties(0)
    values = {"multiprocessors": properties.multi_processor_count, "bytes": properties.total_memory}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader", "-i", "0"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=15).stdout.strip()
        values |= dict(zip(QUERY.split(","), answer.split(", "), strict=False))
    return {**values, "name": properties.name, "capability": f"{properties.major}.{properties.minor}"}


def copies(device):
    rate = clock.copy_rate(device)
    values = {"GB/s": rate / 1e9}
    if device == "cuda":
        name = torch.cuda.get_device_name()
        sheet = next((rate for part, rate in SHEETS.items() if all(word in name for word in part.split())), None)
        if sheet is not None:
            values["share of the data sheet"] = rate / sheet
            if rate < SHARE * sheet:
                raise Wrong(f"copies reach {rate / 1e9:.0f} GB/s, {rate / sheet:.0%} of the data sheet: a busy GPU?")
    return values


def gemms(device):
    names = {"bf16": torch.bfloat16, "float32": torch.float32}
    if device == "cuda":
        names["int8"] = torch.int8
        if torch.cuda.get_device_capability() >= (8, 9):
            names["e4m3"] = torch.float8_e4m3fn
    return {f"{name}, TFLOP/s": clock.gemm_rate(device, dtype) / 1e12 for name, dtype in names.items()}


def launch(device):
    """Of a cast of 16 x 16: its launch, and with memory for the operand; and of an operation of torch."""
    if device != "cuda":
        raise Skipped("needs CUDA")
    (cast, dim), *_ = benchmarks.casts_of(["nvfp4"])
    benchmarks.SHAPE = 16, 16
    made, x = with_memory(benchmarks.launch_of(cast, dim), device), torch.ones(16, 16, device=device)
    call = CastCall(cast, dim, torch.tensor(1, device=device), torch.ones((), device=device))
    return {
        "a launch, us": clock.host_seconds(lambda: gpu.run(made), device) * 1e6,
        "an operand, us": clock.host_seconds(lambda: gpu.make_operand(x, call), device) * 1e6,
        "torch, us": clock.host_seconds(lambda: x.add_(1), device) * 1e6,
    }


def kernels(device):
    if device != "cuda":
        raise Skipped("needs CUDA")
    if (why := gpu.obstacle(torch.device(device))) is not None:
        raise Wrong(f"no kernel runs on {torch.cuda.get_device_name()}: {why}")
