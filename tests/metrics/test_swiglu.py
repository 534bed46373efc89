"""The alignment of a SwiGLU is what its definition says, whatever the size, dtype and place of the weights."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit.metrics import swiglu_alignment


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def defined(gate, up):
    """Cosine and gate norm as they are defined, in float64."""
    gate, up = gate.double(), up.double()
    cosine = (gate * up).sum(1).abs() / (gate.square().sum(1).sqrt() * up.square().sum(1).sqrt())
    return cosine.float(), gate.square().sum(1).sqrt().float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_alignment_equals_its_definition(dtype):
    rows = 1100  # more than are taken at once
    gate, up = normal(rows, 40, seed=1, dtype=dtype) * 0.2, normal(rows, 40, seed=2, dtype=dtype)
    up[:8] += 5 * gate[:8]
    found = swiglu_alignment(gate, up)
    for value, expected in zip((found.cosine, found.gate_norm), defined(gate, up), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planted_alignment(dtype):
    gate = normal(4, 64, dtype=dtype)
    gate[3] = torch.tensor([1.0, 2.0] * 32)
    up = torch.stack([4 * gate[0], -0.5 * gate[1], normal(64, seed=9, dtype=dtype), torch.tensor([-2.0, 1.0] * 32)])
    found = swiglu_alignment(gate, up.to(dtype))
    parallel, opposite, independent, orthogonal = found.cosine.tolist()
    assert 1 - 1e-6 <= parallel <= 1
    assert 1 - 1e-6 <= opposite <= 1, "the sign makes no difference"
    assert 0 < independent < 0.5
    assert orthogonal == 0
    assert found.gate_norm[3].item() == pytest.approx(math.sqrt(160), rel=1e-6)


def test_rows_of_zeros_have_a_cosine_of_zero():
    gate, up = normal(4, 8, seed=1), normal(4, 8, seed=2)
    gate[0] = up[1] = gate[2] = up[2] = 0
    found = swiglu_alignment(gate, up)
    assert found.cosine[:3].tolist() == [0, 0, 0]
    assert found.cosine[3] > 0
    assert (found.gate_norm == 0).tolist() == [True, False, True, False]
    empty = swiglu_alignment(torch.ones(3, 0), torch.ones(3, 0))
    assert empty.cosine.tolist() == empty.gate_norm.tolist() == [0, 0, 0]
    assert swiglu_alignment(gate[:0], up[:0]).cosine.shape == (0,)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30])
def test_alignment_of_rows_whose_squares_no_float32_holds(size):
    gate = normal(3, 16).mul(size)
    found = swiglu_alignment(gate, -gate)
    torch.testing.assert_close(found.cosine, torch.ones(3))
    torch.testing.assert_close(found.gate_norm, gate.double().norm(dim=1).float(), rtol=1e-6, atol=2e-45)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(value):
    """They are seen in their own channel, and nowhere else."""
    gate, up = normal(4, 8, seed=1), normal(4, 8, seed=2)
    whole = swiglu_alignment(gate, up)
    gate[0, 3] = up[1, 3] = value
    up[0] = 0  # a row of zeros hides nothing
    found = swiglu_alignment(gate, up)
    assert found.cosine.isnan().tolist() == [True, True, False, False]
    assert found.gate_norm.isnan().tolist() == [True, False, False, False]
    assert found.cosine[2:].tolist() == whole.cosine[2:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_alignment_under_autocast(dtype):
    """bf16 products would move cosines by a hundredth."""
    gate, up = normal(32, 64, seed=1, dtype=dtype), normal(32, 64, seed=2, dtype=dtype)
    expected = swiglu_alignment(gate, up)
    with torch.autocast("cpu", torch.bfloat16):
        found = swiglu_alignment(gate, up)
        assert torch.is_autocast_enabled("cpu")
    for name in ("cosine", "gate_norm"):
        assert getattr(found, name).dtype == torch.float32
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name


def test_alignment_leaves_its_arguments_alone_and_records_no_gradient():
    gate, up = (torch.nn.Parameter(normal(4, 8, seed=seed)) for seed in (1, 2))
    before = [tensor.detach().clone() for tensor in (gate, up)]
    found = swiglu_alignment(gate, up)
    assert not any(value.requires_grad for value in (found.cosine, found.gate_norm))
    assert all(torch.equal(a, b) for a, b in zip(before, (gate, up), strict=True))


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes; a view makes none."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result


def test_alignment_of_a_large_mlp_takes_little_memory_and_waits_for_nothing():
    """Tensors without data: whoever asked one for its value would fail."""
    gate, up = (torch.empty(11008, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    with _Largest() as seen:
        found = swiglu_alignment(gate, up)
    for value in (found.cosine, found.gate_norm):
        assert value.shape == (11008,)
        assert value.device.type == "meta"
    assert seen.bytes == 1024 * 4096 * 4


def test_alignment_refuses_what_is_no_swiglu():
    gate, up = torch.ones(6, 4), torch.ones(6, 4)
    for wrong in (torch.ones(4, 6), torch.ones(12, 4), torch.ones(6)):
        with pytest.raises(ValueError, match=r"both \[hidden, in\]; got \(6, 4\) and \(.*\)\. Pass those of one MLP"):
            swiglu_alignment(gate, wrong)
    with pytest.raises(ValueError, match=r"got \(6,\) and \(6,\)"):
        swiglu_alignment(gate[:, 0], up[:, 0])
