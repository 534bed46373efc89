"""The choice between eager and generated code."""

import pytest
import torch

from lightning_lowbit import Cast, Scale, kernels, quantize


def test_unknown_backend():
    with pytest.raises(ValueError, match="Unknown backend 'triton': choose 'auto', 'eager' or 'compiled'"):
        kernels.backend("triton").__enter__()


def test_without_a_compiler_casts_run_as_eager_code_and_say_so(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no C++ compiler")

    x, cast = torch.randn(32, 64), Cast(scale=Scale(two_level=True))
    expected = quantize(x, cast).codes
    monkeypatch.setattr(torch, "compile", broken)
    kernels._can_compile.cache_clear()
    try:
        with (
            kernels.backend("compiled"),
            pytest.warns(UserWarning, match=r"no C\+\+ compiler.*Installing a C\+\+ compiler"),
        ):
            found = quantize(x, cast).codes
        with kernels.backend("compiled"):
            quantize(x, cast)  # said once
    finally:
        kernels._can_compile.cache_clear()
    assert torch.equal(found, expected)
