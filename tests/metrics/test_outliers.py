"""Outlier statistics and the alignment of SwiGLUs are what their definitions say, of parts and of the whole."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit.compilation import backend
from lightning_lowbit.metrics import swiglu_alignment
from lightning_lowbit.metrics.outliers import activation_sums, kurtosis, outlier_share
from tests.metrics.activations import activation_outliers, normal
from tests.tables import each


def defined(x, k):
    """Amaxes of channels, kurtosis and share as they are defined, in float64."""
    x = x.double().flatten(0, -2)
    central = x - x.mean()
    beyond = (x.abs() > k * x.square().mean().sqrt()).double().mean()
    return x.abs().amax(0), central.pow(4).mean() / central.square().mean() ** 2, beyond


def check(leading, dtype):
    x = normal(*leading, 40, dtype=dtype) * 0.3 + 0.1
    x[..., 7] *= 30
    assert_defined(activation_outliers(x, 2.5), x, 2.5)
    assert 0 < defined(x, 2.5)[2] < 0.1, "the sample has no outliers"


def assert_defined(found, x, k):
    amax, fourth, share = defined(x, k)
    assert found.channel_amax.equal(amax.float())
    torch.testing.assert_close(found.kurtosis.double(), fourth, rtol=2e-5, atol=0)
    torch.testing.assert_close(found.outliers.double(), share, rtol=1e-6, atol=0)


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("leading", [(300,), (3, 70), (1,)])
def test_equals_its_definition(leading, dtype):
    check(leading, dtype)


@pytest.mark.slow
def test_compiled_equals_its_definition():
    for leading in ((300,), (3, 70)):
        with backend("compiled"):
            check(leading, torch.bfloat16)


def test_parts_add_up():
    x = torch.cat([normal(40, 16), 3 * normal(60, 16, seed=1) + 1])
    parts = [activation_sums(part, 6.0) for part in (x[:40], x[40:])]
    sums, amax = parts[0][0] + parts[1][0], torch.maximum(parts[0][1], parts[1][1])
    whole, whole_amax = activation_sums(x, 6.0)
    torch.testing.assert_close(sums[:5], whole[:5], rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(kurtosis(sums), defined(x, 6.0)[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(kurtosis(3 * sums), kurtosis(sums), rtol=1e-12, atol=0)
    assert outlier_share(torch.stack([sums, whole])).shape == (2,)
    assert amax.equal(whole_amax)
    assert sums.dtype == torch.float64


@pytest.mark.fast("eager")
@pytest.mark.parametrize("name", ["eager", "compiled"])
def test_what_is_not_finite(name):
    for value, bad in ((math.nan, math.isnan), (math.inf, math.isinf)):
        x = normal(20, 8).bfloat16()
        x[5, 2] = value
        with backend(name):
            found = activation_outliers(x)
        assert bad(found.channel_amax[2].item())
        assert found.channel_amax[[0, 1, 3, 4, 5, 6, 7]].isfinite().all(), "other channels are"
        assert found.kurtosis.isnan()
        assert found.outliers.isnan()


def test_nothing_and_nothing_but_one_number():
    for x in (torch.zeros(0, 4), torch.zeros(2, 0, 4)):
        empty = activation_outliers(x)
        assert empty.channel_amax.tolist() == [0] * 4
        assert empty.kurtosis.isnan()
        assert empty.outliers.isnan()
    for number in (0.0, 0.1, -7.0):
        found = activation_outliers(torch.full((30, 4), number))
        assert found.kurtosis.isnan(), "what does not vary has no kurtosis"
        assert found.outliers.item() == 0
    assert activation_outliers(torch.arange(1.0, 5.0)).channel_amax.tolist() == [1, 2, 3, 4], "a vector is one token"


def test_views_and_gradients():
    x = normal(6, 5, 8).requires_grad_()
    for view in (x, x.transpose(0, 1), x[::2], x[..., ::2], x.mT):
        found = activation_outliers(view, 1.5)
        assert not found.kurtosis.requires_grad
        assert_defined(found, view.detach(), 1.5)


def defined_alignment(gate, up):
    """Cosine and gate norm as they are defined, in float64."""
    gate, up = gate.double(), up.double()
    cosine = (gate * up).sum(1).abs() / (gate.square().sum(1).sqrt() * up.square().sum(1).sqrt())
    return cosine.float(), gate.square().sum(1).sqrt().float()


@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_alignment_equals_its_definition(dtype):
    """Also under autocast, whose bf16 products would move cosines by a hundredth; arguments stay as they are."""
    rows = 1100  # more than are taken at once
    gate, up = normal(rows, 40, seed=1, dtype=dtype) * 0.2, normal(rows, 40, seed=2, dtype=dtype)
    up[:8] += 5 * gate[:8]
    before = gate.clone(), up.clone()
    found = swiglu_alignment(gate.requires_grad_(), up.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        again = swiglu_alignment(gate, up)
    for name, expected in zip(("cosine", "gate_norm"), defined_alignment(*before), strict=True):
        value = getattr(found, name)
        assert value.dtype == torch.float32 and not value.requires_grad
        assert value.equal(getattr(again, name))
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    assert gate.equal(before[0]) and up.equal(before[1])


@each("dtype", [torch.float32, torch.bfloat16])
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


@each("size", [1e-42, 1e-30, 1e30])
def test_alignment_of_rows_whose_squares_no_float32_holds(size):
    gate = normal(3, 16).mul(size)
    found = swiglu_alignment(gate, -gate)
    torch.testing.assert_close(found.cosine, torch.ones(3))
    torch.testing.assert_close(found.gate_norm, gate.double().norm(dim=1).float(), rtol=1e-6, atol=2e-45)


@each("value", [math.nan, math.inf, -math.inf])
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
