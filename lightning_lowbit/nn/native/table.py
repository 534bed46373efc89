"""The kinds of native GEMMs, and the pairs of casts that each serves.

Scales of tensors and rows factor out of a GEMM. Scales of blocks lie along its contraction axis and go into it, so each
kind of these GEMMs has one block. A cast with a larger block, or a tile, serves too: its scales are repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_lowbit.kernels.cpu.gemms import shared_block
from lightning_lowbit.kernels.layout import block_shape
from lightning_lowbit.quant import Cast

_INTEGERS = tuple(f"int{bits}" for bits in range(2, 9))


@dataclass(frozen=True)
class NativeGemm:
    """A GEMM of quantized elements."""

    elements: tuple[str, ...]  # formats of the elements, of both operands
    needs: str  # the hardware, in words
    # The least compute capability of an NVIDIA GPU, and the first that is too new, if there is one; None for CPUs.
    nvidia: tuple[tuple[int, int], tuple[int, int] | None] | None
    scale: str | None = None  # format of the scales of blocks
    block: int = 0  # elements along the contraction axis that share a scale; 0 for scales of tensors or rows
    amd: tuple[str, ...] = ()  # architectures of AMD GPUs
    # Dtypes that the GEMM gives; others are computed from emulated operands.
    results: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


# By kind. Blocks, formats and hardware are those of torch 2.13's scaled_mm (ScaledBlas.cpp).
NATIVE: dict[str, NativeGemm] = {
    "fp8": NativeGemm(
        elements=("e4m3", "e5m2"),
        needs="native FP8 GEMMs need an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell)",
        nvidia=((8, 9), None),
    ),
    "int8": NativeGemm(
        elements=("ternary", *_INTEGERS),
        needs="native int8 GEMMs need an NVIDIA GPU of compute capability 7.5 or more, or a CPU with VNNI",
        nvidia=((7, 5), None),
    ),
    "nvfp4": NativeGemm(
        elements=("e2m1",),
        scale="e4m3",
        block=16,
        needs="native NVFP4 GEMMs need an NVIDIA GPU of compute capability 10.0 or more (Blackwell)",
        nvidia=((10, 0), None),
    ),
    "mxfp4": NativeGemm(
        elements=("e2m1",),
        scale="e8m0",
        block=32,
        needs="native MXFP4 GEMMs need an NVIDIA GPU of compute capability 10.0 or 10.3 (B200, B300) and a torch with "
        "MSLK, or an AMD GPU of gfx950 (MI350)",
        nvidia=((10, 0), (11, 0)),
        amd=("gfx950",),
        results=(torch.bfloat16,),
    ),
    "mxfp8": NativeGemm(
        elements=("e4m3",),  # E5M2 has no recipe in torch
        scale="e8m0",
        block=32,
        needs="native MXFP8 GEMMs need an NVIDIA GPU of compute capability 10.0 or more (Blackwell), or an AMD GPU of "
        "gfx950 (MI350)",
        nvidia=((10, 0), None),
        amd=("gfx950",),
    ),
    "fp8-blockwise": NativeGemm(
        elements=("e4m3",),
        scale="fp32",
        block=128,
        needs="native FP8 GEMMs with blocks of 128 need an NVIDIA GPU of compute capability 9.0 (Hopper)",
        nvidia=((9, 0), (10, 0)),
    ),
    "cpu": NativeGemm(  # kernels/gemms.py
        elements=("e2m1", "e1m2", "ternary", *_INTEGERS),
        block=16,
        needs="GEMMs of codes on CPUs need the C++ kernels",
        nvidia=None,
        results=(torch.bfloat16, torch.float32),
    ),
}

BLOCK_SCALED = frozenset(kind for kind, native in NATIVE.items() if native.block)


def kinds_of(casts: Sequence[Cast], dims: Sequence[int]) -> tuple[str, ...]:
    """Returns the kinds of native GEMMs of two operands, left and right, which contract these ``dims`` of theirs."""
    return tuple(kind for kind, native in NATIVE.items() if _serves(kind, native, casts, dims))


def _serves(kind: str, native: NativeGemm, casts: Sequence[Cast], dims: Sequence[int]) -> bool:
    if any(cast.element not in native.elements for cast in casts):
        return False
    if kind == "cpu":
        return shared_block(casts[0].spec, dims[0], casts[1].spec, dims[1]) is not None
    if native.block:
        return all(_has_blocks(cast, dim, native) for cast, dim in zip(casts, dims, strict=True))
    return not any(cast.scale.per_block for cast in casts) and _RULES[kind](*casts)


def _has_blocks(cast: Cast, dim: int, native: NativeGemm) -> bool:
    """Returns whether the blocks of a cast consist of those of a native GEMM."""
    if not cast.scale.per_block or cast.scale.format != native.scale:
        return False
    if cast.scale.two_level == "row" or cast.scale.rounding == "stochastic" or cast.scale.correction is not None:
        return False  # one factor per matrix; scales that elements are rounded with
    exact = cast.fits_bfloat16 or not cast.round_to_bfloat16  # the GEMM does not round products of elements and scales
    return exact and block_shape(cast, dim)[1] % native.block == 0


def _fp8(left: Cast, right: Cast) -> bool:
    """Takes at most one operand in E5M2; with scales per row, the second one in E4M3, because CUTLASS, which torch
    mostly uses then, has no other kernel."""
    rows = "row" in (left.scale.block, right.scale.block)
    return right.element == "e4m3" or (left.element == "e4m3" and not rows)


def _int8(left: Cast, right: Cast) -> bool:
    """Takes no delayed scales: integers have no NaN, so that one in the tensor must appear in its scale."""
    whole = all(cast.grid.gemm_dtype == torch.int8 for cast in (left, right))  # 8 bits and a zero point need 9
    return whole and left.scale.source == right.scale.source == "current"


_RULES = {"fp8": _fp8, "int8": _int8}
