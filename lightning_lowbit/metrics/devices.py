"""Dense peak throughputs of GPUs, from NVIDIA's data sheets."""

import re
from collections.abc import Mapping

import torch

# FLOP/s (for int8, operations/s) by the dtype of a GEMM, without the sparsity with which data sheets mostly print twice
# as much. A device has the peaks of the first name that is part of its own.
PEAKS: dict[str, dict[str, float]] = {
    "GB200": {"bfloat16": 2.5e15, "float8": 5.0e15, "int8": 5.0e15, "float4": 10.0e15},
    "B200": {"bfloat16": 2.25e15, "float8": 4.5e15, "int8": 4.5e15, "float4": 9.0e15},
    "H200 NVL": {"bfloat16": 835.5e12, "float8": 1671e12, "int8": 1671e12},
    "H200": {"bfloat16": 989.4e12, "float8": 1978.9e12, "int8": 1978.9e12},
    "H100 NVL": {"bfloat16": 835.5e12, "float8": 1671e12, "int8": 1671e12},
    "H100 PCIe": {"bfloat16": 756e12, "float8": 1513e12, "int8": 1513e12},
    "H100": {"bfloat16": 989.4e12, "float8": 1978.9e12, "int8": 1978.9e12},
    "A100": {"bfloat16": 312e12, "int8": 624e12},
    "L40S": {"bfloat16": 362e12, "float8": 733e12, "int8": 733e12},
}


def peaks_of(device: torch.device) -> Mapping[str, float]:
    """Returns the peaks of a device; empty if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peaks for chip, peaks in PEAKS.items() if re.search(rf"{chip}(?!\d)", name)), {})
