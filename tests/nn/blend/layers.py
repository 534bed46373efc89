"""Blended layers, and the casts that tests blend."""

import torch

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.nn import set_blend
from lightning_lowbit.nn.casts.presets import quantization_aware
from tests.nn.layers import GEMMS, every, layer_like, remember

TOKENS, IN, OUT = 24, 64, 32
NVFP4 = LinearCasts.preset("nvfp4")
ROWS = Cast("int8", Scale("fp32", "row"))
SATURATING = Cast("e2m1", Scale("e8m0", 32, "floor"))
REMEMBERED = (0.5, 2.0)


# Without what is done to a GEMM's operands before they are quantized, which λ = 0 leaves where it is.
PLAIN = {
    **{name: LinearCasts.preset(name) for name in ("ternary", "int8", "int4", "int2", "e1m2", "nvfp4", "mxfp4")},
    **{name: LinearCasts.preset(name) for name in ("fp8-delayed", "fp8-current", "fp8-row")},
    "W4A16": quantization_aware(None, Cast("int4", Scale("fp32", 32), round_to_bfloat16=True)),
    "from min to max": quantization_aware(
        ROWS, Cast("int4", Scale("fp32", 32, statistic="minmax"), round_to_bfloat16=True)
    ),
    "rows": every(ROWS),
    "rows reused": every(ROWS, dgrad_w="fprop", wgrad_x="fprop"),
    "tensors reused": LinearCasts.preset("fp8-current").replace(dgrad_w="fprop", wgrad_x="fprop"),
    "some hp": NVFP4.replace(fprop_x=None, dgrad_w=None, wgrad_g=None),
    "qaf": NVFP4.phase("qaf"),
    "surrogates": every(SATURATING, surrogate={"fprop_x": "trust", "fprop_w": "dge"}),
    "surrogates, delayed": LinearCasts.preset("fp8-delayed").replace(surrogate={"fprop_x": "dge", "fprop_w": "trust"}),
}

CASTS = {
    **PLAIN,
    "nvfp4-nvidia": LinearCasts.preset("nvfp4-nvidia"),
    "mxfp4-rht": LinearCasts.preset("mxfp4-rht"),
    "rotated": NVFP4.replace(hadamard=dict.fromkeys(GEMMS, 16)),
    "rotated, surrogates": every(SATURATING, hadamard={"fprop": 16}, surrogate={"fprop_x": "trust", "fprop_w": "dge"}),
    "centered": NVFP4.replace(subtract_mean=list(GEMMS)),
    "smoothed": LinearCasts.preset("fp8-current").replace(smooth="channel"),
}


def tensors(dtype=torch.float32):
    """Input, with a channel that is far larger, and gradient of the output."""
    generator = torch.Generator().manual_seed(6)
    x, g = (torch.randn(TOKENS, size, generator=generator) for size in (IN, OUT))
    x[:, 5] *= 30
    return x.to(dtype), g.to(dtype)


def blended(original, casts, blend, **kwargs):
    """A converted copy; λ is set as a tensor, which it stays at 1."""
    layer = layer_like(original, casts, **kwargs)
    remember(layer, *REMEMBERED)
    set_blend(layer, None if blend is None else torch.tensor(blend))
    return layer
