"""Ternary quantization-aware training."""

from typing import Any

from lightning_lowbit.checks import number
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.presets import quantization_aware
from lightning_lowbit.precision.base import LowBitPrecision
from lightning_lowbit.precision.integer import integer_cast
from lightning_lowbit.quant import Cast


class TernaryPrecision(LowBitPrecision):
    """BitNet b1.58: weights of -1, 0, 1 times their mean magnitude, integer activations (arXiv 2402.17764, section 2).

        w_q = γ · clamp(round(W / γ), -1, 1)      γ = scale_factor · mean|W|, of each weight matrix
        x_q = round(x · s) / s                    s = (2^(bits - 1) - 1) / max|x|, of each token

    The gradient is a straight-through estimate: backward passes use w_q and x_q, and are not quantized themselves.
    Where the hardware has int8 units, the forward GEMM runs on them, exactly. BitNet's RMSNorm before each layer
    (SubLN) has parameters, so it belongs to the model: the recipes' ``network: bitnet-small`` has it. The output layer
    stays in high precision, as BitNet's, unless ``quantize_output`` is true, see :class:`LowBitPrecision`.

    Args:
        activation_bits: 2 to 8; None leaves activations in high precision.
        scale_factor: factor in γ. Of normally distributed weights, 1 makes about 31 % zero, and 2/√3 = 1.1547 35.5 %.
        **kwargs: arguments of :class:`LowBitPrecision`.

    Examples:
        >>> Trainer(plugins=[TernaryPrecision()])
    """

    leaves_output = True

    def __init__(self, activation_bits: int | None = 8, *, scale_factor: float = 1.0, **kwargs: Any) -> None:
        number("scale_factor", scale_factor, "what mean|W| is multiplied by", above=0, below=2**16)
        ternary = LinearCasts.preset("ternary")
        assert isinstance(ternary.fprop_x, Cast) and isinstance(ternary.fprop_w, Cast)
        x = integer_cast("activation_bits", activation_bits, ternary.fprop_x)
        super().__init__(quantization_aware(x, ternary.fprop_w.replace(scale={"factor": scale_factor})), **kwargs)
