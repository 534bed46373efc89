"""Factors, bias and rounding of a GEMM's result by the C++ kernels equal the plain code to the bit."""

import torch

from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels.products import finish
from lightning_lowbit.nn.gemm import _finish


def test_factors_and_biases_of_all_shapes_and_dtypes():
    torch.manual_seed(0)
    rows, columns = 40, 70
    factors = [torch.randn(()), torch.randn(rows, 1), torch.randn(1, columns)]
    for product in (torch.randn(rows, columns), torch.randint(-(2**30), 2**30, (rows, columns), dtype=torch.int32)):
        for pair in ([], factors[:1], factors[1:2], factors[:2], factors[1:], [factors[2], factors[0]]):
            for bias in (None, torch.randn(columns), torch.randn(columns).bfloat16(), torch.randn(1, columns)):
                for dtype in (torch.float32, torch.bfloat16):
                    with backend("cpp"):
                        found = finish(product, pair, bias, dtype)
                    with backend("eager"):
                        expected = _finish(product, pair, bias, dtype)
                    assert found is not None
                    assert found.dtype == dtype
                    where = f"{product.dtype} {[f.shape for f in pair]} {None if bias is None else bias.dtype} {dtype}"
                    assert torch.equal(found, expected), where


def test_what_is_not_covered_takes_plain_code():
    product = torch.randn(8, 6)
    with backend("cpp"):
        assert finish(product.double(), [], None, torch.float32) is None
        assert finish(product, [], torch.randn(8, 6), torch.float32) is None, "a bias for each element"
        assert finish(product, [], None, torch.float16) is None
