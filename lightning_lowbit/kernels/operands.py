"""Operands of GEMMs, each by one call of a kernel where one serves, else by the plain code.

All implementations give the same bits. The plain code of :mod:`lightning_lowbit.quant` is the specification.
"""

import warnings
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.compilation import backend, opaque, takes_cpp, takes_triton
from lightning_lowbit.kernels.cpu import casts as cpu
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.memory import resolved
from lightning_lowbit.quant.blocks import tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import (
    Operand,
    are_regular,
    fake_operand,
    has_factor,
    operand_dtype,
    plain_operand,
    stands_alone,
)
from lightning_lowbit.quant.operand import quantize_operand as plain_quantize_operand
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.shard import amax_of as plain_amax
from lightning_lowbit.quant.transforms import Hadamard, rotated_shape
from lightning_lowbit.quant.transforms import rotate as plain_rotate

_SMALL = 2**16  # elements, of which one core measures the amax in 10 µs


def quantize_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
    rotation: Tensor | None = None,
) -> Operand:
    """Quantizes one operand of a GEMM, as :func:`lightning_lowbit.quant.quantize_operand`, by the fastest code.

    With ``rotation``, the signs of a Hadamard transform (:meth:`Hadamard.diagonal`), the operand is that of
    ``rotate(x, rotation, dim)``, to the bit, and ``amax`` and ``shard`` are those of this matrix.

    Examples:
        >>> quantize_operand(torch.randn(4, 64), Cast("e2m1", Scale("e4m3", 16)), dim=1).values.shape
        torch.Size([4, 64])
    """
    if torch.compiler.is_compiling():
        to, of_shard = dtype or operand_dtype(x.dtype, cast), None if shard is None else shard.spec
        values, factor = _quantize_operand(x, cast.spec, dim, key, amax, to, of_shard, rotation)
        return Operand(values, factor if has_factor(cast) else None)
    made, x = None, resolved(x)
    if type(x) in (Tensor, Parameter):  # FakeTensor and other subclasses have no memory of their own
        if takes_cpp(x.device):
            made = cpu.quantize(x, cast.spec, dim, key, amax, dtype, shard, rotation)
        elif takes_triton(x.device):
            made = _by_triton(x, cast, dim, key, amax, dtype, shard, rotation)
    if made is not None:
        return made
    if rotation is not None:
        return quantize_operand(rotate(x, rotation, dim), cast, dim, key, amax, dtype, shard)
    return plain_quantize_operand(x, cast, dim, key, amax, dtype, shard)


def _by_triton(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype | None,
    shard: Shard | None,
    rotation: Tensor | None,
) -> Operand | None:
    """The operand where a Triton kernel makes it; None where none does, or where the plain code refuses the
    arguments."""
    size, device = 0 if rotation is None else len(rotation), x.device
    dtype, offset = dtype or operand_dtype(x.dtype, cast), None
    if (
        not 0 < x.numel() < 2**31
        or x.dim() != 2
        or not are_regular(cast.draws, cast.scale.needs_amax, key, amax, device)
    ):
        return None
    if not stands_alone(cast, dim, amax, shard) or (rotation is not None and not gpu.are_signs(rotation, x, dim)):
        return None
    if not _agrees(cast.spec, dim, x.dtype, dtype, device, size):
        return None
    if shard is not None and key is not None:
        shape = x.shape if rotation is None else rotated_shape(x.shape, rotation, dim)
        offset = shard.offset(shape, tile_of(cast, dim, 2), device)
    values, factor = gpu.quantize_operand(x, cast, dim, key, amax, dtype, offset, rotation)
    return Operand(values, factor if has_factor(cast) else None)


def quantize_both(
    x: Tensor,
    casts: tuple[Cast, Cast],
    keys: tuple[Tensor | None, Tensor | None],
    amax: Tensor | None,
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
) -> tuple[Operand, Operand] | None:
    """The operands of a matrix along its rows (dim 1) and along its columns (dim 0), each as :func:`quantize_operand`
    makes it, from one read of a tensor of :func:`reads_once`; None where no kernel makes both."""
    device, x = x.device, resolved(x)
    if not 0 < x.numel() < 2**31 or x.dim() != 2:
        return None
    to = dtypes[0] or operand_dtype(x.dtype, casts[0]), dtypes[1] or operand_dtype(x.dtype, casts[1])
    for cast, key in zip(casts, keys, strict=True):
        if not are_regular(cast.draws, cast.scale.needs_amax, key, amax if cast.scale.needs_amax else None, device):
            return None
    if not _agree(casts[0].spec, casts[1].spec, x.dtype, to, device):
        return None
    made = gpu.quantize_both(x, *casts, *keys, amax, to)
    row, column = (Operand(v, f if has_factor(cast) else None) for (v, f), cast in zip(made, casts, strict=True))
    return row, column


@cache
def _agree(
    row: str, column: str, source: torch.dtype, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> bool:
    """Whether one kernel serves two casts, and equals their own kernels on a sample: asked once; warns if not."""
    casts = Cast.from_spec(row), Cast.from_spec(column)
    if gpu.covers_both(*casts) is not None:
        return False
    if not all(
        _agrees(cast.spec, dim, source, to, device) for cast, dim, to in zip(casts, (1, 0), dtypes, strict=True)
    ):
        return False
    sample, key = sample_of(source, device), torch.tensor(0x5DEECE66D, device=device)
    found = gpu.quantize_both(sample, *casts, key, key, None, dtypes)
    for cast, dim, dtype, made in zip(casts, (1, 0), dtypes, found, strict=True):
        expected, compared = gpu.quantize_operand(sample, cast, dim, key, None, dtype), 1 + has_factor(cast)
        if not found_equal(cast, device, expected[:compared], made[:compared]):
            return False
    return True


def sample_of(dtype: torch.dtype, device: torch.device, rows: int = 64) -> Tensor:
    """A matrix ``[rows, 160]`` of widely different magnitudes, on which kernels are compared with the plain code."""
    generator = torch.Generator("cpu").manual_seed(0)
    normal, exponents = torch.randn(2, rows, 160, generator=generator, device="cpu")
    return (normal * (4 * exponents).exp()).to(device, dtype)


@cache
def _agrees(spec: str, dim: int, source: torch.dtype, dtype: torch.dtype, device: torch.device, size: int = 0) -> bool:
    """Whether the Triton kernel of a cast serves, and equals the plain code on a sample, rotated in groups of ``size``
    unless it is 0: asked once per device; warns if it differs."""
    cast = Cast.from_spec(spec)
    if gpu.covers(cast, torch.empty(1, 1, dtype=source, device=device), dtype) is not None:
        return False
    if size and gpu.rotates(cast, dim) is not None:
        return False
    sample, key = sample_of(source, device), torch.tensor(0x5DEECE66D, device=device)
    signs = Hadamard(size).diagonal(None, device) if size else None
    with torch.no_grad(), backend("eager"):
        turned = sample if signs is None else plain_rotate(sample, signs, dim)
        plain = plain_operand(turned, cast.spec, dim, key, None, dtype, None)
    found = gpu.quantize_operand(sample, cast, dim, key, None, dtype, None, signs)
    compared = 1 + has_factor(cast)
    return found_equal(cast, device, plain[:compared], found[:compared])


def found_equal(
    cast: Cast | str, device: torch.device, expected: tuple[Tensor, ...], found: tuple[Tensor, ...]
) -> bool:
    """Whether a kernel's results are those of the plain code; warns if not."""
    if all(torch.equal(a.float(), b.float()) for a, b in zip(expected, found, strict=True)):
        return True
    warnings.warn(
        f"The Triton kernel of {cast} differs from the plain code on {device}, and is not used there: the plain code "
        "is slower, with the right bits. Please report the GPU and the versions of torch and Triton.",
        stacklevel=2,
    )
    return False


def _fake_operand(
    x: Tensor,
    spec: str,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype,
    shard: str | None,
    rotation: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    x = x if rotation is None else x.new_empty(rotated_shape(x.shape, rotation, dim))
    values, factor = fake_operand(x, spec, dim, key, amax, dtype, shard)
    return values, factor if has_factor(Cast.from_spec(spec)) else x.new_empty(0, dtype=torch.float32)


@opaque(_fake_operand)
def _quantize_operand(
    x: Tensor,
    spec: str,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype,
    shard: str | None,
    rotation: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    cast, part = Cast.from_spec(spec), None if shard is None else Shard.from_spec(shard)
    values, factor = quantize_operand(x, cast, dim, key, amax, dtype, part, rotation)
    return values, x.new_empty(0, dtype=torch.float32) if factor is None else factor


def coverage(
    casts: Iterable[Cast], device: torch.device | str = "cpu", rotated_along: int | None = None
) -> dict[Cast, str]:
    """Which implementation serves each cast on a device, in words: the name of a backend, or why it is plain code.

    ``rotated_along`` asks for operands with a Hadamard transform along dimension 0 or 1. Where a kernel of its own
    rotates them before, the reason stands behind the name.

    Examples:
        >>> coverage([Cast("e2m1", Scale("e4m3", 16)), Cast("e3m0", Scale("e8m0", 32))]).values()
        dict_values(['cpp', 'plain code: elements without a mantissa'])
    """
    found = {}
    for cast in casts:
        if torch.device(device).type == "cpu":
            name, why = "cpp", cpu.obstacle(cast) or (None if library() else "the C++ kernels cannot be built")
            apart = cpu.rotates(cast)
        else:
            sample = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
            name, why = "triton", gpu.covers(cast, sample, operand_dtype(sample.dtype, cast))
            apart = gpu.rotates(cast, rotated_along or 0)
        if rotated_along is not None and apart is not None:
            name += f", rotated before: {apart}"
        found[cast] = name if why is None else f"plain code: {why}"
    return found


@opaque(lambda x, shard=None, rotation=None, dim=1: x.new_empty((), dtype=torch.float32))
def amax_of(x: Tensor, shard: str | None = None, rotation: Tensor | None = None, dim: int = 1) -> Tensor:
    """max|x|, as :func:`lightning_lowbit.quant.shard.amax_of`, by the fastest code; with ``rotation`` that of
    ``rotate(x, rotation, dim)``. ``shard`` is the spec of one."""
    x = resolved(x)
    if shard is not None:
        return plain_amax(x if rotation is None else rotate(x, rotation, dim), Shard.from_spec(shard))
    made = cpu.amax_of(x, rotation, dim) if _is_by_cpp(x) else None
    if made is None and _is_by_triton(x, rotation, dim):
        made = gpu.amax_of(x, rotation, dim)
    return plain_amax(x if rotation is None else rotate(x, rotation, dim)) if made is None else made


def measures_again(x: Tensor) -> bool:
    """Whether several casts of a tensor had better each measure its amax: a call of a kernel takes longer than that."""
    return not torch.compiler.is_compiling() and _is_by_cpp(x) and x.numel() <= _SMALL


def reads_once(x: Tensor) -> bool:
    """Whether there are kernels that make two operands of a tensor from one read: those of GPUs."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and takes_triton(x.device)


def rotate(x: Tensor, signs: Tensor, dim: int, inverse: bool = False) -> Tensor:
    """A matrix as :func:`lightning_lowbit.quant.rotate` has it, by the fastest code."""
    made = None
    if not inverse and not torch.compiler.is_compiling():
        x = resolved(x)
        made = cpu.rotate(x, signs, dim) if _is_by_cpp(x) else None
        if made is None and _is_by_triton(x, signs, dim):
            made = gpu.rotate(x, signs, dim)
    return plain_rotate(x, signs, dim, inverse) if made is None else made


def _is_by_cpp(x: Tensor) -> bool:
    """Whether the C++ kernels are those of a tensor."""
    return takes_cpp(x.device) and type(x) in (Tensor, Parameter)


def _is_by_triton(x: Tensor, rotation: Tensor | None, dim: int) -> bool:
    """Whether the Triton kernels measure or rotate a matrix."""
    if not takes_triton(x.device) or type(x) not in (Tensor, Parameter) or x.numel() == 0 or x.dim() != 2:
        return False
    if gpu.obstacle(x.device) is not None:
        return False
    return rotation is None or (gpu.are_signs(rotation, x, dim) and _rotates_equally(len(rotation), x.dtype, x.device))


@cache
def _rotates_equally(size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton kernel rotates a sample as the plain code does: asked once per device; warns if not."""
    sample = torch.randn(64, 160, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(device, dtype)
    signs = Hadamard(size).diagonal(None, device)
    expected = tuple(plain_rotate(sample, signs, dim) for dim in (0, 1))
    found = tuple(gpu.rotate(sample, signs, dim) for dim in (0, 1))
    return found_equal(f"Hadamard transforms of {size}", device, expected, found)
