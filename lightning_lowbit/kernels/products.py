"""Products of GEMMs: factors, bias and the rounding of a float32 result in one launch."""

import warnings
from functools import cache

import torch
from torch import Tensor

from lightning_lowbit.compilation import takes_cpp, takes_triton
from lightning_lowbit.kernels.cpu import products as cpu
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.memory import resolved


def finish(product: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``product * factors + bias``, computed in float32 and rounded once to ``dtype``; None where no kernel does it.

    Args:
        product: float32 or int32 ``[m, n]``.
        factors: at most two, float32, 0-d, ``[m, 1]`` or ``[1, n]``, multiplied one by one.
        bias: what broadcasts to ``[m, n]``, or None.
    """
    if type(product) is not Tensor or product.numel() == 0:
        return None
    product, factors, bias = resolved(product), [resolved(factor) for factor in factors], resolved(bias)
    if takes_cpp(product.device):
        return cpu.finish(product, factors, bias, dtype)
    if not takes_triton(product.device):
        return None
    is_covered = product.dtype in (torch.float32, torch.int32) and gpu.obstacle(product.device) is None
    return gpu.finish(product, factors, bias, dtype) if is_covered and _agrees(product.device) else None


@cache
def _agrees(device: torch.device) -> bool:
    """Whether the kernel equals plain code on a sample: asked once per device; warns if not."""
    generator = torch.Generator("cpu").manual_seed(0)
    product, rows, columns, bias = (
        torch.randn(shape, generator=generator, device="cpu").to(device)
        for shape in ((40, 72), (40, 1), (1, 72), (72,))
    )
    expected = (product * rows * columns + bias).bfloat16()
    if torch.equal(gpu.finish(product, [rows, columns], bias, torch.bfloat16), expected):
        return True
    warnings.warn(
        f"The Triton kernel that scales the results of GEMMs differs from plain code on {device}, and is not used. "
        "Please report the GPU and the versions of torch and Triton.",
        stacklevel=2,
    )
    return False
