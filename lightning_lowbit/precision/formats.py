"""Plugins by family of formats: FP8 and FP4 training, integer and ternary quantization-aware training."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from lightning_lowbit.checks import choose, flag, integer, number
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.presets import quantization_aware
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.nn.conversion.convert import CastsLike
from lightning_lowbit.precision.base import LowBitPrecision
from lightning_lowbit.quant import Cast, Scale

_FP8 = {  # presets by scaling
    "delayed": "fp8-delayed",
    "current": "fp8-current",
    "row": "fp8-row",
    "blockwise": "fp8-blockwise",
    "mx": "mxfp8",
}
_FP4 = {"e2m1", "e1m2"}  # elements

Group = int | Literal["row", "tensor"]
ScaleFormat = Literal["fp32", "bf16", "fp16"]


class FP8Precision(LowBitPrecision):
    """Training with all six operands of each linear layer in FP8 (FP8 Formats for Deep Learning, arXiv 2209.05433).

    GEMMs run on FP8 tensor cores where there are some for the scaling, see docs/concepts/hardware.md. Other hardware
    uses emulation, with the same results up to the order of summation.

    Args:
        scaling: ``"delayed"``: one scale per tensor, from amaxes of previous steps. ``"current"``: one per tensor, from
            the tensor itself. ``"row"``: one per token or channel. ``"blockwise"``: one per 1x128 elements of x and
            g, and 128x128 of w (DeepSeek-V3). ``"mx"``: one power of two per 32 elements (MXFP8).
        history: number of steps in the history of delayed scaling.
        algorithm: ``"max"`` or ``"most_recent"`` of the history.
        margin: headroom above the amax, in powers of two.
        power_of_two: round scales to powers of two; always so with ``"mx"``.
        gradient_format: ``"e5m2"`` or ``"e4m3"``; x and w are in E4M3. None for E5M2, or E4M3 with ``"mx"`` (arXiv
            2506.08027) and ``"blockwise"``.
        **kwargs: arguments of :class:`LowBitPrecision`.

    Raises:
        ValueError: an argument is invalid, or belongs to another scaling.

    Examples:
        >>> Trainer(plugins=[FP8Precision("delayed", overrides={"up_proj": "bf16"}, skip=["lm_head"])])
    """

    def __init__(
        self,
        scaling: str = "delayed",
        *,
        history: int = 16,
        algorithm: str = "max",
        margin: int = 0,
        power_of_two: bool = False,
        gradient_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        scale: dict[str, Any] = {"history": history, "algorithm": algorithm, "margin": margin}
        if flag("power_of_two", power_of_two) and scaling != "mx":
            scale["rounding"] = "power_of_two"
        casts: dict[str, Any] = {"preset": _FP8[choose("scaling", scaling, _FP8)], "every": {"scale": scale}}
        if gradient_format is not None:
            choose("gradient_format", gradient_format, ("e4m3", "e5m2"))
            casts |= dict.fromkeys(("dgrad_g", "wgrad_g"), {"element": gradient_format})
        super().__init__(casts, **kwargs)


class FP4Precision(LowBitPrecision):
    """Fully quantized training in FP4: all six operands of the three GEMMs (FP4 All the Way, arXiv 2505.19115).

    The output layer stays in high precision unless ``quantize_output`` is true, see :class:`LowBitPrecision`.

    Args:
        casts: as in :class:`LowBitPrecision`, a preset with an operand in FP4 at least; NVFP4 by default.
        rounding: other roundings for some operands, e.g. ``{"wgrad_x": "nearest"}``; ``overrides`` are not changed.
        **kwargs: arguments of :class:`LowBitPrecision`.

    Raises:
        ValueError: a preset quantizes to other formats alone.
        ValueError: ``rounding`` names an unknown operand or rounding, or an operand in high precision.

    Examples:
        >>> Trainer(plugins=[FP4Precision("nvfp4", rounding={"wgrad_x": "nearest"})])
    """

    leaves_output = True

    def __init__(self, casts: CastsLike = "nvfp4", *, rounding: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        operands = LinearCasts.of(casts)
        elements = {cast.element for name in OPERANDS if (cast := operands.cast_of(name)) is not None}
        if isinstance(casts, str) and elements and not elements & _FP4:
            raise ValueError(
                f"FP4Precision takes presets in FP4, and {casts!r} quantizes to {' and '.join(sorted(elements))}: give "
                f"LowBitPrecision({casts!r}), which takes any preset; on the command line --trainer.plugins "
                f"lightning_lowbit.LowBitPrecision --trainer.plugins.casts {casts}."
            )
        super().__init__(operands.with_rounding(rounding or {}), **kwargs)


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
        **kwargs: arguments of :class:`LowBitPrecision`.

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
        if activation_group is None:
            activation_group = group
        x = integer_cast("activation_bits", activation_bits, _groups("activation_group", activation_group, "absmax"))
        weight_cast = _groups("group", group, "absmax" if symmetric else "minmax", scale_format)
        w = integer_cast("weight_bits", weight_bits, weight_cast)
        super().__init__(quantization_aware(x, w), **kwargs)


def _groups(argument: str, group: Group, statistic: Any, scale_format: str = "fp32") -> Cast:
    """Returns the cast of a tensor. With groups within a row, code times scale is rounded."""
    if group not in ("row", "tensor") and (type(group) is not int or group < 1):
        raise ValueError(f"{argument} is a number of elements such as 128, 'row' or 'tensor'; got {group!r}.")
    return Cast("int8", Scale(scale_format, group, statistic=statistic), round_to_bfloat16=isinstance(group, int))


def integer_cast(argument: str, bits: int | None, cast: Cast) -> Cast | None:
    """Returns the cast with integers of this many bits as elements; None if ``bits`` is None."""
    integer(argument, bits, 2, "a number of bits", at_most=8, or_none=True)
    return None if bits is None else cast.replace(element=f"int{bits}")


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
