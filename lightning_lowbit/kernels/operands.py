"""Operands of GEMMs, each by one call of a kernel where one serves, else by the plain code.

All implementations give the same bits. The plain code of :mod:`lightning_lowbit.quant` is the specification.
"""

import warnings
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbit.compilation import backend, current_backend, opaque
from lightning_lowbit.kernels.cpu import casts as cpu
from lightning_lowbit.kernels.cpu.library import library
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.quant.blocks import tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import (
    Operand,
    are_regular,
    factor_shape,
    fake_operand,
    has_factor,
    operand_dtype,
    plain_operand,
    stands_alone,
)
from lightning_lowbit.quant.shard import Shard
from lightning_lowbit.quant.shard import amax_of as plain_amax


def quantize_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
) -> Operand:
    """Quantizes one operand of a GEMM, as :func:`lightning_lowbit.quant.quantize_operand`, by the fastest code.

    Examples:
        >>> quantize_operand(torch.randn(4, 64), Cast("e2m1", Scale("e4m3", 16)), dim=1).values.shape
        torch.Size([4, 64])
    """
    if not torch.compiler.is_compiling() and (made := _by_kernel(x, cast.spec, dim, key, amax, dtype, shard)):
        return made
    dtype, spec = dtype or operand_dtype(x.dtype, cast), None if shard is None else shard.spec
    values, factor = _quantize_operand(x, cast.spec, dim, key, amax, dtype, spec)
    return Operand(values, factor if has_factor(cast) else None)


def _by_kernel(
    x: Tensor,
    spec: str,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype | None,
    shard: Shard | None,
) -> Operand | None:
    """The operand where a kernel makes it; None where none does, or where the plain code refuses the arguments."""
    chosen = current_backend()
    if type(x) not in (Tensor, Parameter):  # FakeTensor and other subclasses have no memory of their own
        return None
    if x.is_cpu and chosen in ("auto", "cpp"):
        return cpu.quantize(x, spec, dim, key, amax, dtype, shard)
    if chosen == "triton" or (chosen == "auto" and x.is_cuda):
        return _by_triton(x, Cast.from_spec(spec), dim, key, amax, dtype, shard)
    return None


def _by_triton(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype | None,
    shard: Shard | None,
) -> Operand | None:
    dtype, tile = dtype or operand_dtype(x.dtype, cast), tile_of(cast, dim, 2)
    is_cut = not stands_alone(cast, dim, amax, shard)
    is_regular = are_regular(cast.draws, cast.scale.needs_amax, key, amax, x.device)
    if gpu.covers(cast, x, dtype, is_cut) is not None or x.numel() == 0 or not is_regular:
        return None
    if not _agrees(cast.spec, dim, x.dtype, dtype, x.device):
        return None
    offset = None if shard is None or key is None else shard.offset(x.shape, tile, x.device)
    values, factor = gpu.quantize_operand(x, cast, dim, key, amax, dtype, offset)
    return Operand(values, factor if has_factor(cast) else None)


@cache
def _agrees(spec: str, dim: int, source: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton kernel of a cast equals the plain code on a sample: asked once per device; warns if not."""
    cast, generator = Cast.from_spec(spec), torch.Generator("cpu").manual_seed(0)
    normal, exponents = torch.randn(2, 64, 160, generator=generator, device="cpu")
    sample = normal * (4 * exponents).exp()
    sample, key = sample.to(device, source), torch.tensor(0x5DEECE66D, device=device)
    with torch.no_grad(), backend("eager"):
        plain = plain_operand(sample, cast.spec, dim, key, None, dtype, None)
    found = gpu.quantize_operand(sample, cast, dim, key, None, dtype)
    compared = 1 + has_factor(cast)
    return found_equal(cast, device, plain[:compared], found[:compared])


def found_equal(cast: Cast, device: torch.device, expected: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> bool:
    """Whether a kernel's results are those of the plain code; warns if not."""
    if all(torch.equal(a.float(), b.float()) for a, b in zip(expected, found, strict=True)):
        return True
    warnings.warn(
        f"The Triton kernel of {cast} differs from the plain code on {device}, and is not used there: the plain code "
        "is slower, with the right bits. Please report the GPU and the versions of torch and Triton.",
        stacklevel=2,
    )
    return False


@opaque(fake_operand)
def _quantize_operand(
    x: Tensor, spec: str, dim: int, key: Tensor | None, amax: Tensor | None, dtype: torch.dtype, shard: str | None
) -> tuple[Tensor, Tensor]:
    made = _by_kernel(x, spec, dim, key, amax, dtype, None if shard is None else Shard.from_spec(shard))
    if made is None:
        return plain_operand(x, spec, dim, key, amax, dtype, shard)
    shape = () if made.factor is not None else factor_shape(x, Cast.from_spec(spec), dim)
    return made.values, x.new_empty(shape, dtype=torch.float32) if made.factor is None else made.factor


def coverage(casts: Iterable[Cast], device: torch.device | str = "cpu") -> dict[Cast, str]:
    """Which implementation serves each cast on a device, in words: the name of a backend, or why it is plain code.

    Examples:
        >>> coverage([Cast("e2m1", Scale("e4m3", 16)), Cast("e3m0", Scale("e8m0", 32))]).values()
        dict_values(['cpp', 'plain code: elements without a mantissa'])
    """
    found = {}
    for cast in casts:
        if torch.device(device).type == "cpu":
            name, why = "cpp", cpu.obstacle(cast) or (None if library() else "the C++ kernels cannot be built")
        else:
            sample = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
            name, why = "triton", gpu.covers(cast, sample, operand_dtype(sample.dtype, cast))
        found[cast] = name if why is None else f"plain code: {why}"
    return found


@opaque(lambda x, shard=None: x.new_empty((), dtype=torch.float32))
def amax_of(x: Tensor, shard: str | None = None) -> Tensor:
    """max|x|, as :func:`lightning_lowbit.quant.shard.amax_of`, by the fastest code; ``shard`` is the spec of one."""
    chosen = current_backend()
    if shard is not None or type(x) not in (Tensor, Parameter):
        return plain_amax(x, None if shard is None else Shard.from_spec(shard))
    if x.is_cpu and chosen in ("auto", "cpp"):
        made = cpu.amax_of(x)
        return plain_amax(x) if made is None else made
    by_triton = chosen == "triton" or (chosen == "auto" and x.is_cuda)
    if by_triton and x.numel() and x.dim() == 2 and gpu.obstacle(x.device) is None:
        return gpu.amax_of(x)
    return plain_amax(x)
