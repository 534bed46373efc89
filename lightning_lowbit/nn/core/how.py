"""All that follows from a layer's casts, a dtype and a device for its passes, worked out once."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import GEMMS, OPERANDS
from lightning_lowbit.nn.core.frozen import Frozen
from lightning_lowbit.nn.core.operands import GemmHow, OperandHow
from lightning_lowbit.nn.core.parallel import WHOLE, Shards
from lightning_lowbit.nn.core.sides import Codes, FrozenBytes, Gathered, Gradient, Matrix, Parameter, Patches, Recast
from lightning_lowbit.nn.core.window import Window


class How:
    """The three GEMMs of a layer, and what x, w and g are.

    Args:
        casts, dtype, device: the casts in force, in what the pass computes, and where.
        exact: computes float32 GEMMs over exact operands.
        shards: which of x, w and g are shards of global matrices.
        layer: what errors of the backward pass call the layer.
        window: of a convolution, whose x are images; None where x is a matrix.
        frozen: what the bytes of a frozen weight are; None for a matrix.
        is_gathered: whether the weight was quantized before it was gathered.
        saves_codes: saves x as codes and scales, where the casts have such an operand.
        native: the GEMMs that the device computes natively, with their kinds.
        recasts: saves the parameter itself for the backward pass, and quantizes it again there.
        is_grouped: takes stacks of products, each of whose GEMMs is a grouped one.

    Attributes:
        takes_stacks: whether one pass computes a stack of products, each of whose GEMMs is one call.
    """

    def __init__(
        self,
        casts: LinearCasts,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        shards: Shards = WHOLE,
        layer: str = "(without a name)",
        window: Window | None = None,
        frozen: Frozen | None = None,
        is_gathered: bool = False,
        saves_codes: bool = False,
        native: Mapping[str, str] = MappingProxyType({}),
        recasts: bool = False,
        is_grouped: bool = False,
    ) -> None:
        self.casts, self.dtype, self.layer, self.window, self.frozen = casts, dtype, layer, window, frozen
        traits = casts.traits
        operands = {
            name: OperandHow(name, casts, dtype, device, exact, native, shards, is_grouped) for name in OPERANDS
        }
        for operand in operands.values():
            operand.scaling = operands[operand.scaled_as]
        self.operands = operands
        self.fprop, self.dgrad, self.wgrad = (GemmHow(gemm, operands, casts) for gemm in GEMMS)
        x, w = (self.fprop.left, self.wgrad.right), (self.fprop.right, self.dgrad.right)
        self.x = Matrix(*x)
        # Codes of the forward pass lie along its contraction.
        are_codes_read = traits.coded == "wgrad_x" or (x[0].kind is None and x[1].kind is None)
        if window is not None:
            self.x = Patches(*x, window, takes_tensor="fprop_x" not in traits.altered)
        elif saves_codes and traits.coded is not None and are_codes_read:
            self.x = Codes(*x, traits.coded)
        self.w = Parameter(*w)
        if frozen is not None:
            self.w = FrozenBytes(*w, frozen)
        elif is_gathered:
            self.w = Gathered(*w)
        elif recasts and not (("dgrad_w" in traits.from_fprop or w[1].is_reused) and "fprop_w" in traits.altered):
            self.w = Recast(*w)
        self.g = Gradient(self.dgrad.left, self.wgrad.left, traits.casts_g_twice)
        self.takes_stacks = all(operand.takes_stacks for operand in operands.values()) and (
            type(self.x) is Matrix or (is_grouped and type(self.x) is Codes)
        )
        self.is_grouped = is_grouped
