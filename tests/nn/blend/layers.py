"""Blended layers, and the casts that tests blend."""

import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.nn import set_blend
from lightning_lowbit.nn.casts.presets import quantization_aware
from tests.nn import named_casts
from tests.nn.layers import GEMMS, layer_like, remember
from tests.nn.named_casts import NVFP4

TOKENS, IN, OUT = 24, 64, 32
REMEMBERED = (0.5, 2.0)
INT4 = Cast("int4", Scale("fp32", 32), round_to_bfloat16=True)
NAMED = (
    *("ternary", "int8", "int4", "int2", "e1m2", "nvfp4", "mxfp4", "fp8-delayed", "fp8-current", "fp8-row"),
    *("rows", "rows reused", "tensors reused", "some hp", "qaf", "surrogates", "delayed, surrogates"),
)
# Without what is done to a GEMM's operands before they are quantized, which λ = 0 leaves where it is.
PLAIN = {
    **{name: named_casts.CASTS[name] for name in NAMED},
    "W4A16": quantization_aware(None, INT4),
    "from min to max": quantization_aware(
        Cast("int8", Scale("fp32", "row")), INT4.replace(scale={"statistic": "minmax"})
    ),
}
CASTS = {
    **PLAIN,
    **{name: named_casts.CASTS[name] for name in ("nvfp4-nvidia", "mxfp4-rht", "surrogates, rotated", "channels")},
    "rotated": NVFP4.replace(hadamard=dict.fromkeys(GEMMS, 16)),
    "centered": NVFP4.replace(subtract_mean=list(GEMMS)),
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
