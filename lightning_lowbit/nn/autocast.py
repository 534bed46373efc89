"""Autocast, switched off around code that chooses its own dtypes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_NOTHING = nullcontext()


def no_autocast(device_type: str) -> AbstractContextManager[None]:
    """``torch.autocast(device_type, enabled=False)``, which takes longer to enter than a small GEMM."""
    if not torch.is_autocast_enabled(device_type):
        return _NOTHING
    if torch.compiler.is_compiling():
        return torch.autocast(device_type, enabled=False)
    return _switched_off(device_type)


@contextmanager
def _switched_off(device_type: str) -> Iterator[None]:
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, True)
