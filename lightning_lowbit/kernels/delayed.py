"""Delayed scaling: recording an operand's amax, and choosing the one that scales it, in one launch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_lowbit.compilation import takes_cpp, takes_triton
from lightning_lowbit.kernels.cpu import casts as cpu
from lightning_lowbit.kernels.gpu import casts as gpu


def delayed_amax(own: Tensor, in_force: Tensor, staged: Tensor | None, places: Sequence[int]) -> Tensor | None:
    """The amax that scales an operand with delayed scaling: the one in force, or its own while there is none.

    Args:
        own: float32, 0-d: max|x| of the operand. A new tensor is returned.
        in_force: float32 ``[6]``, of a layer's operands; 0 where there is none.
        staged: float32 ``[6]``, of the current step, raised in place to ``own`` where that is finite; None to record
            nothing.
        places: of the operand in both, then of those that reuse it, and are recorded with it.

    Returns:
        float32, 0-d; None, and nothing has happened, where no kernel does it.

    Examples:
        >>> delayed_amax(torch.tensor(3.0), torch.zeros(6), torch.zeros(6), [1, 3])
        tensor(3.)
    """
    if torch.compiler.is_compiling():
        return None
    count, device = in_force.numel(), own.device
    is_covered = _is_plain(own, 1, device) and _is_plain(in_force, count, device)
    is_covered &= staged is None or _is_plain(staged, count, device)
    if not is_covered or not 0 <= min(places) <= max(places) < count:
        return None
    if takes_cpp(device):
        return cpu.delayed_amax(own, in_force, staged, places)
    if takes_triton(device) and gpu.obstacle(device) is None:
        return gpu.delayed_amax(own, in_force, staged, places)
    return None


def _is_plain(tensor: Tensor, elements: int, device: torch.device) -> bool:
    """Whether kernels may touch so many elements of a tensor, of float32 and on this device."""
    is_dense = type(tensor) is Tensor and tensor.dtype == torch.float32 and tensor.is_contiguous()
    return is_dense and tensor.numel() == elements and tensor.device == device and not tensor.is_neg()
