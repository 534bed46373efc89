"""Quantized linear layers."""

from lightning_lowbit.nn import presets as presets
from lightning_lowbit.nn.amax import AmaxHistories
from lightning_lowbit.nn.casts import PHASES, PRESETS, LinearCasts
from lightning_lowbit.nn.conversion.bake import bake
from lightning_lowbit.nn.conversion.convert import convert, plan, set_blend, set_phase
from lightning_lowbit.nn.conversion.coverage import Coverage, GemmCounter
from lightning_lowbit.nn.conversion.frozen import pack_frozen, unpack_frozen
from lightning_lowbit.nn.conversion.shared_amax import SharedAmaxes
from lightning_lowbit.nn.conversion.smooth_swiglu import SwiGLU, fold, smooth_swiglu, swiglus
from lightning_lowbit.nn.keys import LayerKeys
from lightning_lowbit.nn.layers.grouped import GroupedLinear
from lightning_lowbit.nn.layers.linear import register_linear
from lightning_lowbit.nn.linear import QuantizedLayer, QuantLinear
from lightning_lowbit.nn.plan import OPERANDS

__all__ = [
    "OPERANDS",
    "PHASES",
    "PRESETS",
    "AmaxHistories",
    "Coverage",
    "GemmCounter",
    "GroupedLinear",
    "LayerKeys",
    "LinearCasts",
    "QuantLinear",
    "QuantizedLayer",
    "SharedAmaxes",
    "SwiGLU",
    "bake",
    "convert",
    "fold",
    "pack_frozen",
    "plan",
    "register_linear",
    "set_blend",
    "set_phase",
    "smooth_swiglu",
    "swiglus",
    "unpack_frozen",
]
