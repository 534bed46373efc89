"""Peak throughputs of the device of a run."""

import re
from collections.abc import Mapping

import torch

from lightning_lowbit.data_sheets import PEAKS

# Behind the name of a chip: other chips, and slower versions of one.
_OTHERS = r"(?!\d| D\b| Laptop)"


def peaks_of(device: torch.device) -> Mapping[str, float]:
    """Returns the peaks of a device; empty if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peaks for chip, peaks in PEAKS.items() if re.search(chip + _OTHERS, name)), {})
