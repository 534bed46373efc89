"""The alignment of a SwiGLU is what its definition says, whatever the size, dtype and place of the weights."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit.metrics import swiglu_alignment


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def defined(gate, up, x):
    """Cosine, gate norm and share of active tokens as they are defined, in float64."""
    gate, up, x = gate.double(), up.double(), x.double().flatten(0, -2)
    cosine = (gate * up).sum(1).abs() / (gate.square().sum(1).sqrt() * up.square().sum(1).sqrt())
    z = x @ gate.t()
    assert ((z.abs() - 1).abs() > 1e-5).all(), "the sample has a token whose side float32 does not tell"
    return cosine.float(), gate.square().sum(1).sqrt().float(), (z.abs() > 1).double().mean(0).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("leading", [(37,), (3, 5), (2, 3, 4), (1,)], ids=str)
def test_alignment_equals_its_definition(leading, dtype):
    gate, up = normal(24, 40, seed=1, dtype=dtype) * 0.2, normal(24, 40, seed=2, dtype=dtype)
    up[:8] += 5 * gate[:8]
    x = normal(*leading, 40, seed=3, dtype=dtype)
    found = swiglu_alignment(gate, up, x)
    for value, expected in zip((found.cosine, found.gate_norm, found.active), defined(gate, up, x), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    one = swiglu_alignment(gate, up, x.flatten(0, -2)[0])
    assert set(one.active.tolist()) <= {0.0, 1.0}, "a vector is one token"


def test_alignment_of_more_rows_and_tokens_than_are_taken_at_once():
    gate, up, x = normal(2500, 6, seed=1), normal(2500, 6, seed=2), normal(3, 700, 6, seed=3)
    found = swiglu_alignment(gate, up, x)
    expected = (gate.double() @ x.double().flatten(0, 1).t()).abs() > 1
    # One token of 2100 may lie so close to 1 that its side is a matter of rounding.
    torch.testing.assert_close(found.active, expected.double().mean(1).float(), rtol=0, atol=1.5 / 2100)
    cosine = torch.nn.functional.cosine_similarity(gate.double(), up.double()).abs()
    torch.testing.assert_close(found.cosine, cosine.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.gate_norm, gate.norm(dim=1))


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
    assert found.active is None, "without tokens"


def test_active_by_hand():
    gate = torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    x = torch.tensor([[[1.0, 2.0], [-1.5, 2.5]], [[1.25, -4.0], [0.0, 0.0]]])
    found = swiglu_alignment(gate, torch.ones(3, 2), x)
    assert found.active.tolist() == [0.5, 0.5, 0.0], "1 itself is not beyond 1"
    assert found.gate_norm.tolist() == [1, 0.5, 0]
    assert swiglu_alignment(gate, gate, x[:0]).active.isnan().all(), "of no tokens there is no share"


def test_rows_of_zeros_have_a_cosine_of_zero():
    gate, up = normal(4, 8, seed=1), normal(4, 8, seed=2)
    gate[0] = up[1] = gate[2] = up[2] = 0
    found = swiglu_alignment(gate, up, normal(5, 8))
    assert found.cosine[:3].tolist() == [0, 0, 0]
    assert found.cosine[3] > 0
    assert (found.gate_norm == 0).tolist() == [True, False, True, False]
    assert found.active[[0, 2]].tolist() == [0, 0]
    empty = swiglu_alignment(torch.ones(3, 0), torch.ones(3, 0), torch.ones(2, 0))
    assert empty.cosine.tolist() == empty.gate_norm.tolist() == empty.active.tolist() == [0, 0, 0]
    assert swiglu_alignment(gate[:0], up[:0], normal(5, 8)).active.shape == (0,)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30])
def test_alignment_of_rows_whose_squares_no_float32_holds(size):
    gate = normal(3, 16).mul(size)
    found = swiglu_alignment(gate, -gate)
    torch.testing.assert_close(found.cosine, torch.ones(3))
    torch.testing.assert_close(found.gate_norm, gate.double().norm(dim=1).float(), rtol=1e-6, atol=2e-45)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(value):
    """They are seen in their own channel, and nowhere else."""
    gate, up, x = normal(4, 8, seed=1), normal(4, 8, seed=2), normal(5, 8)
    whole = swiglu_alignment(gate, up, x)
    gate[0, 3] = up[1, 3] = value
    up[0] = 0  # a row of zeros hides nothing
    found = swiglu_alignment(gate, up, x)
    assert found.cosine.isnan().tolist() == [True, True, False, False]
    assert found.gate_norm.isnan().tolist() == [True, False, False, False]
    assert found.active.isnan().tolist() == [math.isnan(value), False, False, False]
    assert found.cosine[2:].tolist() == whole.cosine[2:].tolist()
    assert found.active[1:].tolist() == whole.active[1:].tolist()
    if math.isinf(value):
        assert found.active[0] == 1, "an infinity is beyond 1"


def test_a_token_that_is_nan_is_seen_in_every_channel():
    x = normal(3000, 8)
    x[2999, 0] = math.nan
    found = swiglu_alignment(normal(4, 8, seed=1), normal(4, 8, seed=2), x)
    assert found.active.isnan().all()
    assert found.cosine.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_alignment_under_autocast(dtype):
    """bf16 products would move tokens across 1, and cosines by a hundredth."""
    gate, up, x = normal(32, 64, seed=1) * 0.1, normal(32, 64, seed=2), normal(500, 64, seed=3)
    assert ((x @ gate.t()).abs() > 1).sum() != ((x.bfloat16() @ gate.bfloat16().t()).abs() > 1).sum()
    gate, up, x = gate.to(dtype), up.to(dtype), x.to(dtype)
    expected = swiglu_alignment(gate, up, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = swiglu_alignment(gate, up, x)
        assert torch.is_autocast_enabled("cpu")
    for name in ("cosine", "gate_norm", "active"):
        assert getattr(found, name).dtype == torch.float32
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name


def test_alignment_leaves_its_arguments_alone_and_records_no_gradient():
    gate, up = (torch.nn.Parameter(normal(4, 8, seed=seed)) for seed in (1, 2))
    x = normal(5, 8).requires_grad_()
    before = [tensor.detach().clone() for tensor in (gate, up, x)]
    found = swiglu_alignment(gate, up, x)
    assert not any(value.requires_grad for value in (found.cosine, found.gate_norm, found.active))
    assert all(torch.equal(a, b) for a, b in zip(before, (gate, up, x), strict=True))


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
    gate, up, x = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in [(11008, 4096)] * 2 + [(4096,) * 2]
    )
    with _Largest() as seen:
        found = swiglu_alignment(gate, up, x)
    for value in (found.cosine, found.gate_norm, found.active):
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
    for x in (torch.ones(5, 6), torch.ones(4, 1), torch.ones(())):
        with pytest.raises(ValueError, match=r"x needs 4 columns, \[\.\.\., in\], .*; got \(.*\)\. Pass what enters"):
            swiglu_alignment(gate, up, x)
