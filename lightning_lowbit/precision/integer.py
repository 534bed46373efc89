"""Integer quantization-aware training."""

from typing import Any, Literal, get_args

from lightning_lowbit.checks import choose, flag, integer
from lightning_lowbit.nn.casts.presets import quantization_aware
from lightning_lowbit.precision.base import LowBitPrecision
from lightning_lowbit.quant import Cast, Scale

Group = int | Literal["row", "tensor"]
ScaleFormat = Literal["fp32", "bf16", "fp16"]


class IntegerPrecision(LowBitPrecision):
    """Quantization-aware training with integers of 2 to 8 bits, from A8W8 down to A2W2.

        q(x) = s · clamp(round(x / s), -(2^(bits - 1) - 1), 2^(bits - 1) - 1)      s = max|x| / (2^(bits - 1) - 1)

    The gradient is a straight-through estimate: backward passes use the quantized operands, and are not quantized
    themselves (Jacob et al., arXiv 1712.05877, section 3). With groups ``"row"`` or ``"tensor"``, the forward GEMM runs
    on int8 units where the hardware has them.

    Args:
        weight_bits: 2 to 8; None leaves weights in high precision.
        activation_bits: the same for activations.
        group: weights that share a scale: a number of elements along in_features, ``"row"`` (an output channel) or
            ``"tensor"``. With a number, code times scale is rounded to the compute dtype before the GEMM.
        activation_group: the same for activations, where ``"row"`` is a token; None for ``group``.
        symmetric: False gives each group of weights a zero point, so all 2^bits levels span its range. Activations stay
            symmetric.
        scale_format: of the weights' scales: ``"fp32"``, or ``"bf16"`` or ``"fp16"``, in which inference engines keep
            those of groups and rows, so that exported weights are those of the training: bf16 in compressed-tensors'
            folders, fp16 in GGUF files, which hold bf16's from 6e-5 on, too.
        **kwargs: those of :class:`LowBitPrecision`.

    Raises:
        ValueError: bits out of range, or None for both; an unknown group; an argument without effect.

    Examples:
        >>> Trainer(plugins=[IntegerPrecision(4, activation_bits=8, group=128, activation_group="row")])
    """

    def __init__(
        self,
        weight_bits: int | None = 8,
        activation_bits: int | None = 8,
        group: Group = 128,
        *,
        activation_group: Group | None = None,
        symmetric: bool = True,
        scale_format: ScaleFormat = "fp32",
        **kwargs: Any,
    ) -> None:
        if weight_bits is None and activation_bits is None:
            raise ValueError("Give weight_bits or activation_bits: with neither, nothing would be quantized.")
        if not flag("symmetric", symmetric) and weight_bits is None:
            raise ValueError("symmetric=False gives weights zero points, and weight_bits=None leaves them alone.")
        if activation_bits is None and activation_group is not None:
            raise ValueError(f"{activation_group=}, and activation_bits=None leaves activations alone.")
        if choose("scale_format", scale_format, get_args(ScaleFormat)) != "fp32" and weight_bits is None:
            raise ValueError(f"{scale_format=} is of the weights' scales, and weight_bits=None leaves weights alone.")
        if scale_format != "fp32" and not symmetric:
            raise ValueError(
                f"{scale_format=}, and zero points (symmetric=False) have fp32 scales: leave out scale_format; `lowbit "
                "export --rescale` rounds scales."
            )
        of_x = group if activation_group is None else activation_group
        x = integer_cast("activation_bits", activation_bits, _groups("activation_group", of_x, "absmax"))
        of_w = _groups("group", group, "absmax" if symmetric else "minmax", scale_format)
        w = integer_cast("weight_bits", weight_bits, of_w)
        super().__init__(quantization_aware(x, w), **kwargs)


def _groups(argument: str, group: Group, statistic: Any, scale_format: str = "fp32") -> Cast:
    """The cast of a tensor. With groups within a row, code times scale is rounded."""
    if group not in ("row", "tensor") and (type(group) is not int or group < 1):
        raise ValueError(f"{argument} is a number of elements such as 128, 'row' or 'tensor'; got {group!r}.")
    return Cast("int8", Scale(scale_format, group, statistic=statistic), round_to_bfloat16=isinstance(group, int))


def integer_cast(argument: str, bits: int | None, cast: Cast) -> Cast | None:
    """Returns the cast with integers of so many bits as elements; None if ``bits`` is None."""
    integer(argument, bits, 2, "a number of bits", at_most=8, or_none=True)
    return None if bits is None else cast.replace(element=f"int{bits}")
