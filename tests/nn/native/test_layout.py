"""Layouts of codes and scales: those of the formulas, of torchao and of compressed-tensors."""

import pytest
import torch

from lightning_lowbit import Cast, Scale
from lightning_lowbit.compilation import backend
from lightning_lowbit.formats import ELEMENT_FORMATS
from lightning_lowbit.kernels.layout import outer_major, pack_codes, swizzle, unswizzle
from lightning_lowbit.nn.native.gemms import gemm_arguments
from lightning_lowbit.nn.native.operand import block_operand
from lightning_lowbit.quant import quantize_operand
from tests.nn.native.stand_in import unpacked, unswizzled

CASTS = {
    "nvfp4": Cast("e2m1", Scale("e4m3", 16, two_level=True)),
    "mxfp4": Cast("e2m1", Scale("e8m0", 32), "stochastic"),
    "mxfp8": Cast("e4m3", Scale("e8m0", 32)),
}
TILES = {
    "nvfp4": Cast("e2m1", Scale("e4m3", (16, 16))),
    "mxfp4": Cast("e2m1", Scale("e8m0", (32, 32))),
    "mxfp8": Cast("e4m3", Scale("e8m0", (32, 64))),
}


def test_scales_lie_where_the_formula_says():
    for rows, columns in ((1, 1), (128, 4), (129, 5), (300, 7), (32, 4), (257, 16)):
        scales = torch.randint(1, 256, (rows, columns), dtype=torch.uint8)
        flat = swizzle(scales)
        assert flat.is_contiguous() and flat.numel() == -(-rows // 128) * 128 * -(-columns // 4) * 4
        assert torch.equal(unswizzled(flat, rows, columns), scales.double())
        assert torch.equal(unswizzle(flat, rows, columns), scales)
        assert int(flat.long().sum()) == int(scales.long().sum()), "the padding is not zero"


def test_scales_and_codes_equal_torchao():
    blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    pack = pytest.importorskip("torchao.prototype.mx_formats.kernels").pack_uint4
    codes = torch.randint(0, 16, (6, 32), dtype=torch.uint8)
    assert torch.equal(pack_codes(codes), pack(codes))
    for rows, columns in ((128, 4), (129, 5), (40, 9)):
        scales = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
        assert torch.equal(swizzle(scales), blocked(scales).flatten())


def test_the_first_element_is_in_the_low_bits():
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    packed = pack_codes(codes)
    assert packed.tolist() == [[0x21, 0x8F]]
    assert unpacked(packed).tolist() == [[0.5, 1.0, -6.0, -0.0]]


def test_codes_equal_compressed_tensors():
    module = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    codes = torch.randint(0, 16, (6, 32), dtype=torch.uint8)
    values = ELEMENT_FORMATS["e2m1"].decode(codes) + 0.0  # our casts make no -0
    codes = ELEMENT_FORMATS["e2m1"].encode(values)
    assert torch.equal(pack_codes(codes), module.pack_fp4_to_uint8(values))


def test_scales_of_128_have_the_rows_first():
    for shape in ((1, 1), (5, 1), (1, 5), (7, 3)):
        scales = torch.randn(shape)
        assert torch.equal(outer_major(scales), scales)
        assert outer_major(scales).stride() == (1, shape[0])
    for dim in (0, 1):
        for x in (torch.randn(256, 384), torch.randn(384, 256).t()):
            with backend("eager"):
                scales = block_operand(x, Cast("e4m3", Scale("fp32", 128)), "fp8-blockwise", dim).scales
            assert outer_major(scales).data_ptr() == scales.data_ptr(), "operands have them as GEMMs read them"


def decoded(kind, cast, x, dim, key):
    """The packed and swizzled operand, decoded by formulas: float64, in the orientation of ``x``."""
    operand = block_operand(x, cast, kind, dim, key)
    codes, levels = gemm_arguments(operand)
    elements = unpacked(codes) if kind != "mxfp8" else codes.double()
    block = 16 if kind == "nvfp4" else 32
    rows, columns = operand.size
    assert elements.shape == (rows + -rows % 16, columns + -columns % 32)
    scales = unswizzled(levels[0], len(elements), elements.shape[1] // block).repeat_interleave(block, 1)
    values = elements * scales
    assert not values[rows:].any() and not values[:, columns:].any(), "the padding is not zero"
    if kind == "nvfp4":
        assert torch.equal(levels[1], torch.ones(()) if operand.factor is None else operand.factor)
    values = values[:rows, :columns]
    return values if dim == 1 else values.t()


@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (130, 70), (16, 128)], ids=str)
def test_packed_and_swizzled_operands_hold_the_plain_values(shape):
    x, key = torch.randn(shape) / 16, torch.tensor(1)
    for kind, dim in ((kind, dim) for kind in CASTS for dim in (0, 1)):
        for cast in (CASTS[kind], TILES[kind]):
            plain = quantize_operand(x, cast, dim, key)
            found = decoded(kind, cast, x, dim, key)
            assert torch.equal(found, plain.values.double()), f"{cast} of {shape}, dimension {dim}"


@pytest.mark.slow
def test_generated_code_gives_the_same_bytes():
    x, key = torch.randn(40, 96), torch.tensor(3)
    for kind, dim in (("nvfp4", 1), ("mxfp4", 0), ("mxfp8", 1)):
        made = []
        for name in ("eager", "compiled"):
            with backend(name):
                operand = block_operand(x, CASTS[kind], kind, dim, key)
            made.append([tensor.view(torch.uint8) for tensor in operand[:2]])
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True)), kind


def test_codes_are_those_of_the_format():
    for kind in ("nvfp4", "mxfp4"):
        packed = block_operand(torch.randn(48, 96), CASTS[kind], kind, 1, torch.tensor(3)).values
        codes = torch.cat([packed & 15, packed >> 4])
        assert codes.unique().tolist() == [*range(8), *range(9, 16)]  # no -0
        assert torch.equal(codes, CASTS[kind].format.encode(CASTS[kind].format.decode(codes)))
