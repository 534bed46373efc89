"""Casts by the Triton kernels, which equal :func:`lightning_lowbit.quant.quantize_operand` to the bit.

Triton is imported when the first kernel is launched. With ``TRITON_INTERPRET=1`` in the environment the kernels run in
Triton's interpreter, on tensors of CPUs, as tests do.
"""

import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_lowbit.kernels.gpu import launches, sizes
from lightning_lowbit.kernels.gpu.launches import Launch
from lightning_lowbit.kernels.layout import block_shape, empty_laid_out
from lightning_lowbit.kernels.memory import are_signs, traits
from lightning_lowbit.kernels.numbers import CastNumbers
from lightning_lowbit.quant.blocks import tile_of
from lightning_lowbit.quant.call import CastCall, has_factor
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.operand import Operand, empty_operand
from lightning_lowbit.quant.packed import Packed, empty_packed, per_byte
from lightning_lowbit.quant.transforms import rotated_shape

MEASURED = 2**22  # elements, from which a kernel measures an amax in less time than torch

_HERE = nullcontext()
_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
_OUTPUTS = (*_INPUTS, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def covers(cast: Cast, x: Tensor, dtype: torch.dtype) -> str | None:
    """Returns why the kernels do not make the operand of a matrix in a dtype, in words; None where they do."""
    scale = cast.scale
    if (why := obstacle(x.device)) is not None:
        return why
    if x.dtype not in _INPUTS or dtype not in _OUTPUTS:
        return f"operands from {x.dtype} to {dtype}"
    if dtype not in _INPUTS and (scale.per_block or dtype != cast.grid.gemm_dtype):
        return f"{cast} in {dtype}"
    if x.numel() >= 2**31:
        return "matrices of 2^31 elements or more"
    return lacks(cast)


def lacks(cast: Cast) -> str | None:
    """Returns why the kernels make no operand of a cast, in words; None where they make some."""
    scale = cast.scale
    if scale.rounding == "stochastic" and not scale.per_block:
        return "scales of rows or tensors that round stochastically"
    if scale.correction is not None and (_is_uneven(scale.correction) or _is_uneven(launches.block_size(cast))):
        return "corrected groups or blocks that are not of 2, 4, ... or 1024 elements"
    if scale.block == "tensor" and scale.statistic == "minmax":
        return "the range of a whole tensor"
    if scale.per_block and math.prod(sizes.padded_sides(tile_of(cast, 1, 2))) > sizes.LARGEST_BLOCK:
        return f"blocks of more than {sizes.LARGEST_BLOCK} elements"
    return None


def _is_uneven(size: int) -> bool:
    return not 1 < size <= sizes.LARGEST_BLOCK or size & (size - 1) != 0


def is_rare(cast: Cast) -> bool:
    """Returns whether :func:`make_operand` alone has a kernel for a cast."""
    return cast.scale.rounding == "stochastic" or cast.scale.two_level == "row" or cast.scale.format in ("bf16", "fp16")


def covers_both(row: Cast, column: Cast) -> str | None:
    """Returns why :func:`make_both` makes no pair of operands, each of which :func:`covers` covers; or None."""
    if is_rare(row) or is_rare(column):
        return "second levels per row, and scales that are drawn or in 16 bits"
    sizes = launches.block_size(row), launches.block_size(column)
    if any(not 1 <= size <= 128 or size & (size - 1) for size in sizes):
        return "blocks that are not of 1, 2, 4, ... or 128 elements along an axis"
    if math.prod(sizes) > 4096:
        return "blocks whose sizes have a product of more than 4096: a program would hold too many registers"
    return None


def make_operand(x: Tensor, call: CastCall) -> Operand:
    """Makes the operand of a matrix of any strides in one launch, and one for an amax or a mean."""
    scale, sums, amax = call.cast.scale, None, _amax(x, call)
    if sizes.amaxes_of_lines(x, call):
        amax = _line_amaxes(x, call.dim % 2)
    if scale.block == "tensor" and scale.statistic == "absmean":
        sums = torch.empty(launches.SUMS, dtype=torch.float64, device=x.device)
        run(launches.sums_launch(x, sums))
    operand = empty_operand(x, call)
    run(launches.cast_launch(x, call, amax, sums, *_filled(operand)))
    return operand


def make_both(x: Tensor, row: CastCall, column: CastCall) -> tuple[Operand, Operand]:
    """Makes operands with blocks along rows (dim 1) and along columns (dim 0), from one read of ``x``."""
    operands = empty_operand(x, row), empty_operand(x, column)
    memory = [tensor for operand in operands for tensor in _filled(operand)]
    run(launches.both_launch(x, (row, column), _amax(x, row, column), memory))
    return operands


def _amax(x: Tensor, *calls: CastCall) -> Tensor | None:
    """Returns the amax that scales the matrix: that of a call, or measured; None for casts that need none."""
    for call in calls:
        if call.cast.scale.needs_amax:
            return amax_of(x, call.rotation, call.dim) if call.amax is None else call.amax.float()
    return None


def _line_amaxes(x: Tensor, dim: int) -> Tensor:
    """Returns max|x| along a dimension."""
    if x.stride(dim) == 1:
        return torch.linalg.vector_norm(x, torch.inf, dim, dtype=torch.float32)
    matrix = x if dim == 0 else x.t()
    return _measured(matrix, matrix.shape[1:])


def _measured(x: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
    """Returns max|x| of a matrix, or of each of its columns, whose number is then the ``shape``, in one launch and one
    for zeros."""
    amax = torch.zeros(shape, dtype=torch.float32, device=x.device)
    run(launches.peaks_launch(x, amax))
    return amax


def _filled(operand: Operand) -> tuple[Tensor, Tensor]:
    """Returns values and factor, which kernels write even where it is 1."""
    factor = operand.factor
    return operand.values, operand.values.new_empty((), dtype=torch.float32) if factor is None else factor


def packs(cast: Cast, x: Tensor, dim: int) -> bool:
    """Returns whether :func:`pack` and :func:`unpack` serve a matrix: blocks with sides that are powers of two."""
    if lacks(cast) is not None or is_rare(cast) or not cast.scale.per_block or cast.scale.statistic == "minmax":
        return False
    if cast.element == "e3m0":
        return False
    sides = tile_of(cast, dim, 2)
    even = sides == sizes.padded_sides(sides) and max(sides) <= 128
    return even and x.shape[1] % per_byte(cast.format) == 0 and x.numel() > 0


def pack(x: Tensor, call: CastCall) -> Packed:
    """Makes the packed operand of a matrix in one launch, and one for an amax."""
    packed = empty_packed(x, call)
    run(launches.pack_launch(x, call, _amax(x, call), *packed))
    return packed


def lays_out(cast: Cast, x: Tensor, block: int, dim: int) -> bool:
    """Returns whether :func:`lay_out` serves a matrix: blocks of 16 or 32, or several of them, in powers of two."""
    if obstacle(x.device) is not None or x.dtype not in _INPUTS or not 0 < x.numel() < 2**31:
        return False
    sides = block_shape(cast, dim)
    if block == 128:  # for blocks and tiles of FP8
        is_fp8 = cast.element == "e4m3" and cast.scale.format == "fp32" and cast.scale.statistic == "absmax"
        return is_fp8 and not cast.round_to_bfloat16 and sides in ((1, 128), (128, 128))
    if lacks(cast) is not None or is_rare(cast) or cast.scale.format not in ("e4m3", "e8m0"):
        return False
    if cast.element not in ("e2m1", "e4m3"):  # those of GEMMs: codes of six bits have no layout
        return False
    even = sides == sizes.padded_sides(sides) and max(sides) <= 128 and sides[1] % block == 0
    if cast.scale.four_over_six is not None and 1 not in sides and dim == 0:
        return False  # it sums errors over the rows of a tile before its columns
    return even and block in (16, 32)


def lay_out(x: Tensor, call: CastCall) -> tuple[Tensor, Tensor, Tensor] | None:
    """Does :func:`lightning_lowbit.kernels.layout.make_laid_out` in one launch, and one for an amax; None for codes in
    E4M3 of a contraction of one element: on an H200, Triton 3.6 wrote other bytes than zeros around them."""
    if x.shape[call.dim] == 1 and call.cast.element == "e4m3":
        return None
    laid_out = empty_laid_out(x, call)
    run(launches.layout_launch(x, call, _amax(x, call), *laid_out))
    return laid_out


def lays_out_both(row: CastCall, column: CastCall, x: Tensor) -> bool:
    """Returns whether :func:`lay_out_both` makes a pair of operands: alike but for their rounding, in blocks of a row
    that the GEMM takes as they are."""
    calls, alike = (row, column), row.cast.element == column.cast.element and row.block == column.block
    served = (lays_out(call.cast, x, call.block, dim) for call, dim in zip(calls, (1, 0), strict=True))
    plain = (call.cast.scale.block == call.block and call.cast.scale.four_over_six is None for call in calls)
    return alike and all(plain) and all(served)


def lay_out_both(x: Tensor, row: CastCall, column: CastCall) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
    """Does :func:`lay_out` along rows (dim 1) and along columns (dim 0) in one launch, and one for an amax; None where
    it does not do one of them."""
    if 1 in x.shape and row.cast.element == "e4m3":
        return None
    laid_out = empty_laid_out(x, row), empty_laid_out(x, column)
    run(launches.layouts_launch(x, (row, column), _amax(x, row, column), laid_out))
    return laid_out


def unpack(data: Tensor, factor: Tensor, call: CastCall, shape: torch.Size, source: torch.dtype) -> Operand:
    """Unpacks the operand of a matrix of this shape and dtype in one launch."""
    values = data.new_empty(shape, dtype=call.values_dtype(source))
    run(launches.unpack_launch(data, call.cast, call.dim, source, values))
    return Operand(values, factor if has_factor(call.cast) else None)


def amax_of(x: Tensor, rotation: Tensor | None = None, dim: int = 1) -> Tensor:
    """Returns max|x| of a matrix, or of the rotated one: 0-d float32, 0 if empty, not finite if ``x`` is not."""
    if rotation is None and x.dim() == 2 and MEASURED <= x.numel() < 2**31:
        return _measured(x.t() if launches.is_transposed(x) else x)
    if rotation is None and x.numel() > 0:
        return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    if rotation is not None:
        run(launches.amax_launch(x, amax, rotation, dim))
    return amax


def rotates(x: Tensor, rotation: Tensor, dim: int) -> bool:
    """Returns whether the kernels rotate groups of a matrix along a dimension by these signs."""
    return are_signs(rotation, x, dim) and x.dtype in _INPUTS and x.numel() < 2**30


def rotation_obstacle(cast: Cast, dim: int) -> str | None:
    """Returns why :func:`make_operand` does not rotate as well, in words; None where it does."""
    scale = cast.scale
    if not scale.per_block or scale.two_level == "row":
        return "scales of rows or tensors"
    if scale.correction is not None:  # a rotation of its own is predicted to be faster
        return "corrected groups"
    sides = tile_of(cast, dim, 2)
    if sides != sizes.padded_sides(sides) or sides[0] * sides[1] > 256:
        return "blocks that are not of 1, 2, 4, ... or 256 elements"
    return None


def rotate(x: Tensor, rotation: Tensor, dim: int) -> Tensor:
    values = x.new_empty(rotated_shape(x.shape, rotation, dim))
    run(launches.rotation_launch(x, rotation, dim, values))
    return values


def pad_bytes(x: Tensor, rows: int, columns: int) -> Tensor:
    """Does :func:`lightning_lowbit.kernels.layout.pad` in one launch."""
    result = x.new_empty((x.shape[0] + rows, x.shape[1] + columns))
    run(launches.bytes_launch(x, result))
    return result


def draw_signs(keys: Tensor, size: int) -> Tensor:
    signs = torch.empty((*keys.shape, size), dtype=torch.float32, device=keys.device)
    run(launches.launch("draw_signs", keys.numel(), {"x": keys, "signs": signs}, {"SIZE": size}, warps=1))
    return signs


def delayed_amax(amax: Tensor, in_force: Tensor, staged: Tensor | None, places: Sequence[int]) -> Tensor:
    result = torch.empty_like(amax)
    arguments = {"x": amax, "in_force": in_force[places[0]], "staged": staged, "result": result}
    run(launches.launch("delay", 1, arguments, {"PLACES": sum(1 << place for place in places)}, warps=1))
    return result


def scale_and_round(product: Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Does ``kernels.products.scale_and_round`` on a GPU, for products in float32, bfloat16, int8 or int32."""
    result = torch.empty(product.shape, dtype=dtype, device=product.device)
    run(launches.scale_and_round_launch(product, factors, bias, result))
    return result


@cache
def obstacle(device: torch.device) -> str | None:
    """Returns why no kernel runs on a device, in words; None where they run. Warns where Triton is there and fails."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        if _kernels()[2]:  # interpreted
            return None
    except Exception as error:
        return _broken(error, device)
    if device.type != "cuda" or torch.version.hip is not None:
        return f"tensors on {device.type!r} without CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"GPUs before sm_80, such as sm_{capability[0]}{capability[1]}"
    try:
        run(launches.sums_launch(torch.ones(1, 1, device=device), torch.empty(launches.SUMS, device=device).double()))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler, the linker or the driver: each has its own class
        return _broken(error, device)
    return None


def _broken(error: Exception, device: torch.device) -> str:
    """Returns why Triton builds no kernel, and warns of it."""
    why = f"Triton cannot build its kernels ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    warnings.warn(f"{why}. Casts and optimizers run plain code on {device}, which is slower.", stacklevel=3)
    return why


@cache
def _kernels() -> tuple[ModuleType, dict[torch.dtype, Any], bool]:
    """Returns the kernels, Triton's names of dtypes, and whether kernels are interpreted."""
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


def compiled_for(launch: Launch, capability: int) -> dict[str, Any]:
    """Returns the constants of a launch as its kernel takes them on GPUs of a compute capability, such as 90."""
    _, names, interpreted = _kernels()
    constants = {
        name: names[value] if isinstance(value, torch.dtype) else value for name, value in launch.constants.items()
    }
    for name, value in constants.items():
        if isinstance(value, CastNumbers):
            constants[name] = value._replace(capability=0 if interpreted else capability)
    return constants


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


def options_of(launch: Launch) -> dict[str, Any]:
    """Options of Triton's compiler: no product is fused into a sum, which would round once, not twice."""
    return {"num_warps": launch.warps, "enable_fp_fusion": False}


def run(launch: Launch) -> None:
    """Launches a kernel. Triton's launcher compiles it, and binds the arguments of the first launch; later launches of
    a form with the same traits call what it has compiled, which takes the host a quarter of the time."""
    form, device = launch.form, launch.arguments["x"].device
    values = tuple(launch.arguments.values())
    kind = (device.index, *launch.arguments, *traits(values, device))
    launcher = form.launchers.get(kind)
    with _on(device):
        if launcher is not None:
            launcher(launch.programs, values)
            return
        kernel, constants = getattr(_kernels()[0], form.kernel), compiled_for(launch, _capability(device))
        compiled = kernel[(launch.programs,)](**launch.arguments, **constants, **options_of(launch))
        if hasattr(compiled, "packed_metadata"):  # not in the interpreter
            form.launchers[kind] = _launcher(compiled, kernel.fn, [*launch.arguments], constants)


def _launcher(
    compiled: Any, kernel: Callable[..., None], names: list[str], constants: dict[str, Any]
) -> Callable[[int, tuple[Any, ...]], None]:
    """Returns a function of the number of programs and of values of ``names``, which launches a compiled kernel."""
    parameters = signature(kernel).parameters
    others = {name: constants.get(name, parameters[name].default) for name in parameters if name not in names}
    places = {name: place for place, name in enumerate([*names, *others])}
    in_order, every = itemgetter(*(places[name] for name in parameters)), tuple(others.values())

    def launch(programs: int, values: tuple[Any, ...]) -> None:
        compiled[(programs, 1, 1)](*in_order(values + every))

    return launch


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, which it mostly is already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)
