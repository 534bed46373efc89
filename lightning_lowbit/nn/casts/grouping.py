"""Which casts of a stack one grouped GEMM serves: those whose operands are exact in bfloat16, or are rounded to it."""

import torch

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import OPERANDS, OPERANDS_OF
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.call import operand_dtype


def grouping_obstacle(casts: LinearCasts) -> str | None:
    """Returns why grouped GEMMs do not serve casts, and what to do, in words; None if they do.

    Examples:
        >>> grouping_obstacle(LinearCasts.preset("fp8-blockwise"))
        'elements times scales of fprop_x are not exact in bfloat16, in which grouped GEMMs multiply: give the casts …'
    """
    for name in OPERANDS:
        cast = casts.cast_of(name)
        if cast is not None and operand_dtype(torch.bfloat16, cast) != torch.bfloat16:
            return (
                f"elements times scales of {name} are not exact in bfloat16, in which grouped GEMMs multiply: give the "
                "casts round_to_bfloat16 (every: {round_to_bfloat16: true} beside a preset), or other casts"
            )
    rotated = [
        name for gemm in casts.hadamard for name in OPERANDS_OF[gemm] if not isinstance(getattr(casts, name), Cast)
    ]
    for what, others in (
        ("rotated operands in high precision", rotated),
        ("delayed scaling", casts.traits.delayed),
        ("means that are subtracted", casts.subtract_mean),
        ("surrogate gradients", casts.surrogate),
        ("operands that are quantized again", casts.requantize),
    ):
        if others:
            return f"{what} are computed for one expert after the other ({', '.join(others)}): give other casts"
    return None
