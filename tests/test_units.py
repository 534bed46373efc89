"""Products on CPUs that have no instructions for bfloat16 or float16, and which CPUs these are."""

import platform

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowbit import _torch
from lightning_lowbit.units import Float32Products, cpu_without, float32_products, has_units, lacks_units
from tests.operations import Operations
from tests.tables import each

CPU = torch.device("cpu")


def grouped(x, w):
    return torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=torch.tensor([16, 32], dtype=torch.int32))


PRODUCTS = {
    "linear": (F.linear, [(4, 8, 32), (16, 32), (16,)]),
    "linear without a bias": (F.linear, [(8, 32), (16, 32)]),
    "bmm": (torch.bmm, [(2, 4, 8), (2, 8, 6)]),
    "baddbmm": (torch.baddbmm, [(2, 4, 6), (2, 4, 8), (2, 8, 6)]),
    "einsum": (lambda *x: torch.einsum("ij,kj->ik", *x), [(8, 32), (16, 32)]),
    "conv": (lambda *x: F.conv2d(*x, padding=1), [(2, 4, 8, 8), (6, 4, 3, 3), (6,)]),
    "transposed conv": (F.conv_transpose2d, [(2, 4, 8, 8), (4, 6, 3, 3), (6,)]),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), [(2, 2, 16, 8)]),
    "masked": (lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.eye(16)), [(2, 2, 16, 8)]),
    "grouped": (grouped, [(32, 16), (2, 16, 32)]),
}


def results(function, shapes, dtype, *contexts):
    """The result and the gradients under autocast to a dtype, and the dtypes in which products were computed."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    with Operations() as seen, float32_products([dtype], CPU):
        with torch.autocast("cpu", dtype=dtype):
            y = function(*inputs)
        y.float().square().sum().backward()
    return [y.detach(), *(x.grad for x in inputs if x.grad is not None)], seen.dtypes


@each("name", PRODUCTS)
@each("dtype", [torch.bfloat16, torch.float16])
def test_products_without_units_are_float32s_rounded_once(name, dtype):
    if name == "grouped" and dtype == torch.float16:
        return  # it is called in bfloat16
    with cpu_without():
        expected, native = results(*PRODUCTS[name], dtype)
    with cpu_without(dtype):
        found, wide = results(*PRODUCTS[name], dtype)
    assert (native, wide) == ({dtype}, {torch.float32})
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a.float() - b.float()).norm() <= 2 * torch.finfo(dtype).eps * b.float().norm()


NARROW_VALUES = [(1, 2, 16, 8), (1, 2, 16, 8), (1, 2, 16, 4)]  # torch has no fused attention for them


@each("function, shapes", [*PRODUCTS.values(), (F.scaled_dot_product_attention, NARROW_VALUES)])
def test_products_in_inference_mode_are_those_of_training(function, shapes):
    inputs = [torch.randn(shape) for shape in shapes]
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with cpu_without(torch.bfloat16), Operations() as seen, float32_products([torch.bfloat16], CPU), autocast:
        expected = function(*inputs)
        with torch.inference_mode():
            assert torch.equal(function(*inputs), expected)
    assert seen.dtypes == {torch.float32}


def test_a_recurrent_layer_computes_in_float32():
    """Where oneDNN has no bfloat16, torch raises."""
    lstm, x = nn.LSTM(8, 8), torch.randn(5, 2, 8)
    expected = lstm(x)[0]
    with cpu_without(torch.bfloat16), Float32Products(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = lstm(x)[0]
        found.float().sum().backward()
    assert found.dtype == torch.bfloat16 and all(p.grad is not None for p in lstm.parameters())
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)


@each("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_in_inference_mode_is_that_of_training(kind):
    layer, x = kind(8, 8), torch.randn(5, 2, 8)
    with cpu_without(torch.bfloat16), Float32Products(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)[0]
        with torch.inference_mode():
            assert torch.equal(layer(x)[0], expected)


def test_products_of_other_dtypes_are_torchs():
    x = torch.randn(8, 8)
    with cpu_without(torch.float16), Operations() as seen, Float32Products():
        assert torch.equal(x.bfloat16() @ x.bfloat16(), x.bfloat16() @ x.bfloat16())
    assert seen.dtypes == {torch.bfloat16}


@pytest.mark.slow
def test_compiled_models_compute_in_float32():
    layer, x = nn.Linear(16, 8), torch.randn(4, 16)
    with cpu_without(torch.bfloat16), Float32Products(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)
        with Operations() as seen, Float32Products():
            assert torch.equal(torch.compile(layer)(x), expected)
    assert seen.dtypes == {torch.float32}


def test_what_has_units_pays_nothing():
    with cpu_without():
        assert not isinstance(float32_products([torch.bfloat16, torch.float16], CPU), Float32Products)
    with cpu_without(torch.float16):
        assert not isinstance(float32_products([torch.bfloat16, torch.float32], CPU), Float32Products)
        assert not isinstance(float32_products([torch.float16], torch.device("meta")), Float32Products)


def test_a_cpu_is_what_a_context_says():
    x = torch.zeros(1, dtype=torch.bfloat16)
    for lacking in ([torch.bfloat16], [torch.float16], []):
        with cpu_without(*lacking):
            assert lacks_units(x) == (torch.bfloat16 in lacking) != has_units(torch.bfloat16, CPU)
            assert not lacks_units(x.to("meta")) and not lacks_units(x.float())


@each(
    "machine, supported, instructions, limit, expected",
    [
        ("x86_64", True, True, None, True),
        ("x86_64", True, True, "AVX512_CORE_BF16", True),
        ("x86_64", True, True, "avx512_core_vnni", False),  # converted to float32
        ("x86_64", True, False, None, False),  # AVX-512 without BF16
        ("x86_64", False, True, "AVX2", False),  # oneDNN says so itself
        ("aarch64", True, False, None, True),
        ("aarch64", False, False, None, False),
    ],
)
def test_bfloat16_needs_instructions_that_torch_may_use(machine, supported, instructions, limit, expected, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
        if limit is not None:
            monkeypatch.setenv(name, limit)
        assert _torch.cpu_has_units(torch.bfloat16) == expected


@each("limit, expected", [("AVX2", False), ("avx512_core", False), ("AVX2_VNNI", True), ("ALL", True)])
def test_sums_of_int8_need_instructions_that_torch_may_use(limit, expected, monkeypatch):
    """Otherwise they saturate."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert _torch.has_vnni() == expected
