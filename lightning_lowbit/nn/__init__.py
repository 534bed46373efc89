"""Quantized linear layers."""

from lightning_lowbit.nn.casts import PHASES, PRESETS, LinearCasts
from lightning_lowbit.nn.casts import presets as presets
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.nn.conversion.bake import bake
from lightning_lowbit.nn.conversion.convert import convert, plan, set_blend, set_phase
from lightning_lowbit.nn.conversion.coverage import Coverage, GemmCounter
from lightning_lowbit.nn.conversion.frozen import pack_frozen, unpack_frozen
from lightning_lowbit.nn.conversion.shared_amax import SharedAmaxes
from lightning_lowbit.nn.conversion.smooth_swiglu import SwiGLU, fold, smooth_swiglu, swiglus
from lightning_lowbit.nn.layers.grouped import GroupedLinear
from lightning_lowbit.nn.layers.known_linears import register_linear
from lightning_lowbit.nn.layers.layer import QuantizedLayer, QuantLinear
from lightning_lowbit.nn.state.amax import AmaxHistories
from lightning_lowbit.nn.state.keys import LayerKeys

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
