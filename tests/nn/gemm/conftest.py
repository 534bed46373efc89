"""The calls of native GEMMs, checked for all tests of this folder."""

import pytest
import torch

from tests.nn.native.stand_in import NO_ROWS


def as_gpus_want_it(left, right, arguments):
    """What cuBLAS and CUTLASS ask of layouts, sizes and scales, and the CPU does not."""
    (rows, inner), columns = left.shape, right.shape[1]
    assert inner % 16 == columns % 16 == 0, f"sizes {inner} and {columns}"
    if left.numel() and right.numel():
        assert left.stride() == (inner, 1), f"the left operand {tuple(left.shape)} has strides {left.stride()}"
        assert right.stride() == (1, inner), f"the right operand {tuple(right.shape)} has strides {right.stride()}"
    scales = arguments["scale_a"], arguments["scale_b"]
    assert all(scale.dtype == torch.float32 for scale in scales)
    if any(scale.dim() for scale in scales):
        assert [tuple(scale.shape) for scale in scales] == [(rows, 1), (1, columns)]
        assert scales[0].stride(1) == scales[1].stride(1) == 1
        assert all(scale.is_contiguous() for scale in scales)
        assert arguments["out_dtype"] == torch.bfloat16, "scales of rows come with bfloat16 alone"
    if arguments["bias"] is not None:
        assert arguments["bias"].dtype == arguments["out_dtype"] == torch.bfloat16
        assert arguments["bias"].shape == (columns,)


@pytest.fixture(autouse=True)
def native_calls(monkeypatch):
    """What the native GEMM is called with. Nothing may call it with large operands, which take the CPU minutes."""
    calls = []
    original = torch._scaled_mm

    def spy(left, right, **arguments):
        assert left.numel() * right.shape[1] < 2**20, "too large for the CPU"
        as_gpus_want_it(left, right, arguments)
        if NO_ROWS is not None and arguments["scale_a"].dim() + arguments["scale_b"].dim():
            pytest.skip(NO_ROWS)
        calls.append(arguments)
        return original(left, right, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr("lightning_lowbit.nn.native.gemms.scaled_mm", spy)
        yield calls
