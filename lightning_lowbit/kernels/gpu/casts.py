"""Casts by the Triton kernels, which equal :func:`lightning_lowbit.quant.quantize_operand` to the bit.

Triton is imported when the first kernel is launched. With ``TRITON_INTERPRET=1`` in the environment the kernels run in
Triton's interpreter, on tensors of CPUs, as tests do.
"""

import importlib.util
import math
import warnings
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.kernels.gpu import launches
from lightning_lowbit.kernels.gpu.launches import Launch
from lightning_lowbit.kernels.layout import block_shape, laid_out_shapes
from lightning_lowbit.kernels.memory import together
from lightning_lowbit.quant.blocks import tile_of
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.packed import packed_bytes, per_byte
from lightning_lowbit.quant.scaling import rounding_key
from lightning_lowbit.quant.transforms import SIZES, rotated_shape

_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
_NARROWING = {"DTYPE", "DTYPE_ROW", "ROTATION"}  # constants of kernels that round to a dtype
_OUTPUTS = (*_INPUTS, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def covers(cast: Cast, x: Tensor, dtype: torch.dtype, is_cut: bool = False) -> str | None:
    """Why the kernels do not make the operand of a matrix, in words; None where they do.

    ``dtype`` is that of the values; ``is_cut`` says whether what decides a scale lies on several processes.
    """
    scale = cast.scale
    if (why := obstacle(x.device)) is not None:
        return why
    if is_cut:
        return "scales of blocks, rows, columns or tensors of which each process holds a part"
    if x.dtype not in _INPUTS or dtype not in _OUTPUTS:
        return f"operands from {x.dtype} to {dtype}"
    if dtype not in _INPUTS and (scale.per_block or dtype != cast.grid.gemm_dtype):
        return f"{cast} in {dtype}"
    if x.numel() >= 2**31:
        return "matrices of 2^31 elements or more"
    return lacks(cast)


def lacks(cast: Cast) -> str | None:
    """Why the kernels make no operand of a cast, in words; None where they make some."""
    scale = cast.scale
    if scale.rounding == "stochastic" and not scale.per_block:
        return "scales of rows or tensors that round stochastically"
    if scale.correction is not None and (_is_uneven(scale.correction) or _is_uneven(launches.block_size(cast))):
        return "corrected groups or blocks that are not of 2, 4, ... or 1024 elements"
    if scale.block == "tensor" and scale.statistic == "minmax":
        return "the range of a whole tensor"
    if scale.per_block and math.prod(launches.padded_sides(tile_of(cast, 1, 2))) > launches.LARGEST_BLOCK:
        return f"blocks of more than {launches.LARGEST_BLOCK} elements"
    return None


def _is_uneven(size: int) -> bool:
    return not 1 < size <= launches.LARGEST_BLOCK or size & (size - 1) != 0


def is_rare(cast: Cast) -> bool:
    """Whether :func:`quantize_operand` alone has a kernel for a cast."""
    return cast.scale.rounding == "stochastic" or cast.scale.two_level == "row" or cast.scale.format in ("bf16", "fp16")


def covers_both(row: Cast, column: Cast) -> str | None:
    """Why :func:`quantize_both` does not make two operands that :func:`covers` covers, in words, or None."""
    if is_rare(row) or is_rare(column):
        return "second levels per row, and scales that are drawn or in 16 bits"
    sizes = launches.block_size(row), launches.block_size(column)
    if any(not 1 <= size <= 128 or size & (size - 1) for size in sizes):
        return "blocks that are not of 1, 2, 4, ... or 128 elements along an axis"
    if math.prod(sizes) > 4096:
        return "blocks whose sizes have a product of more than 4096: a program would hold too many registers"
    return None


def quantize_operand(
    x: Tensor,
    cast: Cast,
    dim: int,
    key: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    offset: Tensor | None = None,
    rotation: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The values and the factor of an operand in one launch; an amax or a mean that is to be measured takes one more.

    Args:
        x: ``[rows, columns]``, of any strides.
        cast, dim, key, amax, dtype: as in :func:`lightning_lowbit.quant.quantize_operand`.
        offset: int32 ``[3]``, that of :meth:`Shard.offset`, for a shard whose elements round stochastically.
        rotation: the signs of a Hadamard transform that :func:`rotates` covers, float32 ``[n]``.

    Returns:
        ``elements * scales`` in ``dtype``, contiguous (with scales per row or tensor, the elements alone), and the
        factor: float32, 0-d, ``[rows, 1]`` or ``[1, columns]``.
    """
    if cast.scale.needs_amax:
        amax = amax_of(x, rotation, dim) if amax is None else amax.float()
    elif cast.scale.two_level == "row":
        amax = torch.linalg.vector_norm(x, torch.inf, dim % 2, dtype=torch.float32)
    sums = None
    if cast.scale.block == "tensor" and cast.scale.statistic == "absmean":
        sums = torch.empty(launches.SUMS, dtype=torch.float64, device=x.device)
        run(launches.of_sums(x, sums))
    operand = _empty(x if rotation is None else _rotated(x, rotation, dim), cast, dim, dtype)
    run(launches.of_cast(x, cast, dim, rounding_key(cast, key, x.device), amax, offset, sums, *operand, rotation))
    return operand


def quantize_both(
    x: Tensor,
    row: Cast,
    column: Cast,
    key_row: Tensor | None = None,
    key_column: Tensor | None = None,
    amax: Tensor | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """:func:`quantize_operand` with blocks along rows (dim 1) and along columns (dim 0), from one read of ``x``."""
    if row.scale.needs_amax or column.scale.needs_amax:
        amax = amax_of(x) if amax is None else amax.float()
    keys = rounding_key(row, key_row, x.device), rounding_key(column, key_column, x.device)
    operands = _empty(x, row, 1, dtypes[0]), _empty(x, column, 0, dtypes[1])
    run(launches.of_both(x, (row, column), keys, amax, operands))
    return operands


def packs(cast: Cast, x: Tensor, dim: int) -> bool:
    """Whether :func:`pack` and :func:`unpack` serve a matrix: blocks with sides that are powers of two."""
    if lacks(cast) is not None or is_rare(cast) or not cast.scale.per_block or cast.scale.statistic == "minmax":
        return False
    if cast.element == "e3m0":
        return False
    sides = tile_of(cast, dim, 2)
    even = sides == launches.padded_sides(sides) and max(sides) <= 128
    return even and x.shape[1] % per_byte(cast.format) == 0 and x.numel() > 0


def pack(
    x: Tensor, cast: Cast, dim: int, key: Tensor | None, amax: Tensor | None, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result of :func:`lightning_lowbit.quant.packed.pack` in one launch, and one for an amax."""
    if cast.scale.needs_amax:
        amax = amax_of(x) if amax is None else amax.float()
    data = torch.empty(packed_bytes(x.shape[0], x.shape[1], cast, dim), dtype=torch.uint8, device=x.device)
    factor = torch.empty((), dtype=torch.float32, device=x.device)
    run(launches.of_pack(x, cast, dim, rounding_key(cast, key, x.device), amax, offset, data, factor))
    return data, factor


def lays_out(cast: Cast, x: Tensor, block: int, dim: int) -> bool:
    """Whether :func:`lay_out` serves a matrix: blocks of 16 or 32, or several of them, in powers of two."""
    if obstacle(x.device) is not None or lacks(cast) is not None or is_rare(cast):
        return False
    if cast.scale.format not in ("e4m3", "e8m0"):
        return False
    sides = block_shape(cast, dim)
    even = sides == launches.padded_sides(sides) and max(sides) <= 128 and sides[1] % block == 0
    if cast.scale.four_over_six is not None and 1 not in sides and dim == 0:
        return False  # it sums errors over the rows of a tile before its columns
    return even and block in (16, 32) and x.dtype in _INPUTS and 0 < x.numel() < 2**31


def lay_out(
    x: Tensor, cast: Cast, block: int, dim: int, key: Tensor | None, amax: Tensor | None, offset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of :func:`lightning_lowbit.kernels.layout.plain_lay_out` in one launch, and one for an amax."""
    if cast.scale.needs_amax:
        amax = amax_of(x) if amax is None else amax.float()
    codes, scales = laid_out_shapes(cast, block, dim, x.shape[1 - dim], x.shape[dim])
    made = (
        torch.empty(codes, dtype=cast.format.dtype or torch.uint8, device=x.device),
        torch.empty(scales, dtype=cast.scale.storage.dtype, device=x.device),
        torch.empty((), dtype=torch.float32, device=x.device),
    )
    run(launches.of_layout(x, cast, block, dim, rounding_key(cast, key, x.device), amax, offset, made))
    return made


def unpack_(values: Tensor, data: Tensor, cast: Cast, dim: int, source: torch.dtype) -> None:
    """Writes values as :func:`lightning_lowbit.quant.packed.unpack_`; ``source`` is the packed tensor's dtype."""
    run(launches.of_unpack(data, cast, dim, source, values))


def _empty(x: Tensor, cast: Cast, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for an operand: its values and its factor."""
    shape: tuple[int, ...] = ()
    if cast.scale.block == "row" or cast.scale.two_level == "row":
        shape = (1, x.shape[1]) if dim in (0, -2) else (x.shape[0], 1)
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    return values, torch.empty(shape, dtype=torch.float32, device=x.device)


def amax_of(x: Tensor, rotation: Tensor | None = None, dim: int = 1) -> Tensor:
    """max|x| of a matrix, or of the rotated one: 0-d float32, 0 without elements, not finite if ``x`` is not."""
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    run(launches.of_amax(x, amax, rotation, dim))
    return amax


def are_signs(rotation: Tensor, x: Tensor, dim: int) -> bool:
    """Whether the kernels rotate groups of a matrix along a dimension by these signs."""
    if type(rotation) is not Tensor or rotation.device != x.device or rotation.dtype != torch.float32:
        return False
    are_known = rotation.dim() == 1 and len(rotation) in SIZES and rotation.is_contiguous() and not rotation.is_neg()
    return are_known and dim in (0, 1) and x.dtype in _INPUTS and x.numel() < 2**30


def rotates(cast: Cast, dim: int) -> str | None:
    """Why :func:`quantize_operand` does not rotate as well, in words; None where it does."""
    scale = cast.scale
    if not scale.per_block or scale.two_level == "row":
        return "scales of rows or tensors"
    if scale.correction is not None:  # a rotation of its own is predicted to be faster
        return "corrected groups"
    sides = tile_of(cast, dim, 2)
    if sides != launches.padded_sides(sides) or sides[0] * sides[1] > 256:
        return "blocks that are not of 1, 2, 4, ... or 256 elements"
    return None


def rotate(x: Tensor, rotation: Tensor, dim: int) -> Tensor:
    """A matrix as :func:`lightning_lowbit.quant.rotate` has it, in one launch."""
    values = _rotated(x, rotation, dim)
    run(launches.of_rotation(x, rotation, dim, values))
    return values


def _rotated(x: Tensor, rotation: Tensor, dim: int) -> Tensor:
    return torch.empty(rotated_shape(x.shape, rotation, dim), dtype=x.dtype, device=x.device)


def delayed_amax(own: Tensor, in_force: Tensor, staged: Tensor | None, places: Sequence[int]) -> Tensor:
    """:func:`lightning_lowbit.kernels.delayed.delayed_amax` on a GPU."""
    result = torch.empty_like(own)
    run(launches.of_delay(own, in_force[places[0]], staged, places, result))
    return result


def finish(product: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``product * factors + bias`` in float32, rounded once to ``dtype``.

    Args:
        product: float32, bfloat16, float16 or int32 ``[m, n]``.
        factors: at most two, float32, 0-d, ``[m, 1]`` or ``[1, n]``, multiplied one by one.
        bias: ``[n]``, or what broadcasts to ``[m, n]``.
    """
    result = torch.empty(product.shape, dtype=dtype, device=product.device)
    run(launches.of_finish(product, factors, bias, result))
    return result


@cache
def obstacle(device: torch.device) -> str | None:
    """Why no kernel runs on a device, in words; None where they run."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if _kernels()[2]:  # interpreted
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"tensors on {device.type!r} without CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"GPUs before sm_80, such as sm_{capability[0]}{capability[1]}"
    return _failure(device)


@cache
def _failure(device: torch.device) -> str | None:
    """Why Triton cannot launch a kernel on a GPU, in words, which are a warning, too: it needs a C compiler."""
    try:
        run(
            launches.of_amax(
                torch.ones(1, 1, dtype=torch.float32, device=device),
                torch.zeros((), dtype=torch.float32, device=device),
            )
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler, the linker or the driver: each has its own class
        why = f"Triton cannot build its kernels ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        warnings.warn(f"{why}. Casts and optimizers run plain code on {device}, which is slower.", stacklevel=2)
        return why
    return None


@cache
def _kernels() -> tuple[ModuleType, dict[torch.dtype, Any], bool]:
    """The kernels, Triton's names of dtypes, and whether kernels are interpreted."""
    import triton
    import triton.language as tl

    from lightning_lowbit.kernels.gpu import kernels

    names = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.int8: tl.int8,
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.float8_e5m2: tl.float8e5,
    }
    return kernels, names, triton.knobs.runtime.interpret


def compiled_for(launch: Launch) -> dict[str, Any]:
    """The constants of a launch as its kernel takes them."""
    _, names, interpreted = _kernels()
    constants = {
        name: names[value] if isinstance(value, torch.dtype) else value for name, value in launch.constants.items()
    }
    if not _NARROWING.isdisjoint(constants):
        constants["INTERPRETED"] = interpreted
    return constants


def options_of(launch: Launch) -> dict[str, Any]:
    """How the kernel of a launch is compiled: no product is fused into a sum, which would round once, not twice."""
    return {"num_warps": launch.warps, "enable_fp_fusion": False}


def run(launch: Launch) -> None:
    kernel = getattr(_kernels()[0], launch.kernel)
    device = launch.arguments["x"].device
    together((value for value in launch.arguments.values() if isinstance(value, Tensor)), device)
    with torch.cuda.device_of(launch.arguments["x"]):  # type: ignore[no-untyped-call]
        kernel[(launch.programs,)](**launch.arguments, **compiled_for(launch), **options_of(launch))
