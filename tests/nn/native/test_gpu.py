"""Native GEMMs of GPUs: the emulated ones, up to the order of sums and the digits of accumulation."""

import copy

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, Scale, convert
from lightning_lowbit.nn import OPERANDS, AmaxHistories, LayerKeys
from lightning_lowbit.nn.core.gemm import native_obstacle
from lightning_lowbit.nn.native.table import NATIVE
from tests.nn.layers import pass_through

GPU = torch.device("cuda" if torch.cuda.is_available() else "meta")
OBSTACLES = {kind: native_obstacle(GPU, kind) for kind in NATIVE}
CASTS = {
    "fp8": ["fp8-delayed", "fp8-current", "fp8-row", {"preset": "fp8-current", "smooth": "channel"}],
    "int8": ["ternary", *(dict.fromkeys(OPERANDS, Cast("int8", Scale("fp32", block))) for block in ("row", "tensor"))],
    "nvfp4": ["nvfp4", "nvfp4-nvidia", "nvfp4-4over6", {"preset": "nvfp4", "subtract_mean": ["fprop"]}],
    "mxfp4": ["mxfp4", "mxfp4-rht"],
    "mxfp8": ["mxfp8"],
    "fp8-blockwise": ["fp8-blockwise", {"preset": "fp8-blockwise", "every": {"scale": {"rounding": "power_of_two"}}}],
}


def results(casts, backend, original, x, g):
    layer = convert(copy.deepcopy(original), casts, backend=backend)
    keys = LayerKeys(layer)
    histories = AmaxHistories(layer)
    histories.to_(x.device)
    for _ in range(2):  # with empty histories, and with one amax in each
        keys.fill_(1, device=x.device)
        found = pass_through(layer, x, g)
        histories.advance_()
    return found


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(256, 512, 768), (200, 100, 60), (64, 256, 1), (1, 64, 48), (0, 64, 48)], ids=str)
@pytest.mark.parametrize(("kind", "casts"), [(kind, casts) for kind in CASTS for casts in CASTS[kind]])
def test_native_equals_emulated(kind, casts, sizes, dtype):
    if OBSTACLES[kind] is not None:
        pytest.skip(str(OBSTACLES[kind]))
    tokens, inputs, outputs = sizes
    if kind == "mxfp4" and dtype == torch.float32:
        pytest.skip("MXFP4 GEMMs give bfloat16 alone")
    torch.manual_seed(0)
    original = nn.Linear(inputs, outputs, device="cuda", dtype=dtype)
    x, g = (torch.randn(tokens, n, device="cuda", dtype=dtype) for n in (inputs, outputs))
    found, expected = (results(casts, backend, original, x, g) for backend in ("native", "emulated"))
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        error = (found[name].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1e-30)
        # Two roundings to bfloat16, or the 14 bits of fast accumulation in the forward pass, or of any on Hopper.
        assert error < (2**-8 if dtype == torch.bfloat16 else 2**-10), f"{name} is off by {error:.1e}"
