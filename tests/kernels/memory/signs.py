"""Each way into the kernels, with tensors that torch reads as their negatives, and with their copies."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_lowbit import Cast, Scale
from lightning_lowbit.kernels import (
    amax_of,
    backend,
    delayed_amax,
    lay_out_operand,
    pack_operand,
    quantize_both,
    quantize_operand,
    rotate,
    unpack_operand,
)
from lightning_lowbit.kernels.products import add_patches, scale_and_round
from lightning_lowbit.quant import Hadamard
from tests.quant.tensors import NVFP4

CASTS = {
    "blocks": NVFP4,
    "drawn": NVFP4.replace(rounding="stochastic"),
    "rows": Cast("e4m3", Scale("fp32", "row")),
    "tensor": Cast("int8", Scale("fp32", "tensor")),
    "mean": Cast("ternary", Scale("fp32", "tensor", statistic="absmean")),
}


def same(tensor):
    return tensor


def marked(tensor):
    """The same numbers, contiguous, with the bit that makes torch read them as their negatives."""
    view = torch._neg_view(-tensor)
    assert view.is_neg() and view.is_contiguous() and torch.equal(view, tensor)
    return view


def part_of_a_conjugate(tensor):
    """The same numbers as the imaginary part of a conjugate, which has that bit too."""
    view = torch.complex(tensor.float(), -tensor.float()).conj().imag
    assert view.is_neg() and torch.equal(view, tensor.float())
    return view


def calls(view, source, every=True):
    """What the kernels make of views of some tensors, by the name of the way in; ``every`` cast along both dimensions,
    or each along one."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=draw).to(source)
    x[0, 0] = 5  # the largest magnitude is a positive number's
    key, amax, signs = torch.tensor(0x5DEECE66D), torch.tensor(6.0), Hadamard(16).diagonal(None, torch.device("cpu"))
    factors = [torch.rand(32, 1, generator=draw), torch.rand(1, 64, generator=draw)]
    bias = torch.randn(64, generator=draw)
    ways = {}
    for number, (name, cast) in enumerate(CASTS.items()):
        for dim in (0, 1) if every else (number % 2,):
            used, whole = key if cast.draws else None, amax if cast.scale.needs_amax else None

            def way(part, make, name=name, cast=cast, dim=dim):
                ways[f"{name}, dim {dim}: {part}"] = lambda: make(cast, dim)

            way("cast", lambda c, d, k=used: quantize_operand(view(x), c, d, k if k is None else view(k)))
            way("transposed", lambda c, d, k=used: quantize_operand(view(x.t().contiguous()).t(), c, d, k))
            way("amax", lambda c, d, k=used, a=whole: quantize_operand(x, c, d, k, a if a is None else view(a)))
            way("packed", lambda c, d, k=used: pack_operand(view(x), c, d, k))
            way("unpacked", lambda c, d: _unpacked(view, pack_operand(x, c, d, key), c, d, x))
            way("rotated, matrix", lambda c, d, k=used: quantize_operand(view(x), c, d, k, rotation=signs))
            way("rotated, signs", lambda c, d, k=used: quantize_operand(x, c, d, k, rotation=view(signs)))
    for dim in (0, 1):
        ways[f"rotation, dim {dim}"] = lambda d=dim: rotate(view(x), signs, d)
        ways[f"rotation by signs, dim {dim}"] = lambda d=dim: rotate(x, view(signs), d)
        ways[f"amax rotated, dim {dim}"] = lambda d=dim: amax_of(view(x), None, signs, d)
        ways[f"layout, dim {dim}"] = lambda d=dim: lay_out_operand(view(x), NVFP4, 16, d)
    ways["amax"] = lambda: amax_of(view(x))
    ways["both"] = lambda: quantize_both(view(x), (NVFP4, NVFP4), (None, None), None)
    ways["results of GEMMs"] = lambda: scale_and_round(
        view(x.float()), [view(f) for f in factors], view(bias), torch.float32
    )
    ways["patches"] = lambda: add_patches(view(x), 2, 16, [(16, 16, 4, 1, 1, 1)])
    ways["delayed"] = lambda: delayed_amax(view(amax), view(torch.ones(6)), torch.zeros(6), [1, 2])
    return ways


def _unpacked(view, packed, cast, dim, x):
    data, factor = packed
    return unpack_operand(type(packed)(data, view(factor)), cast, dim, x.shape, x.dtype)


VIEWS = ((torch.float32, marked), (torch.float32, part_of_a_conjugate), (torch.bfloat16, marked))


def differences(name, views=VIEWS, every=True):
    differing, wanted = [], {}
    with backend(name):
        for source, view in views:
            plain = calls(same, source, every)
            for what, call in calls(view, source, every).items():
                if view is part_of_a_conjugate and ("drawn" in what or "packed" in what):
                    continue  # keys are whole numbers
                result = call()  # None where plain code is to do it
                if result is None:
                    continue
                if (what, source) not in wanted:
                    wanted[what, source] = _bits(plain[what]())
                if _bits(result) != wanted[what, source]:
                    differing.append(f"{what}, {source}, {view.__name__}")
    return differing


def _flat(made):
    return [part for part in tree_leaves(made) if isinstance(part, Tensor)]


def _bits(made):
    return [part.resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in _flat(made)]
