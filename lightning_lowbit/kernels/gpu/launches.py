"""Launches of the kernels: name, number of programs and arguments, made without a GPU or Triton."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.kernels.gpu.sizes import (
    LARGEST_LINE,
    amaxes_of_lines,
    block_tile,
    line_tile,
    lines_of,
    padded_sides,
    rotated_tile,
    tile_sides,
    whole_groups,
)
from lightning_lowbit.kernels.layout import block_shape, multiples, round_up
from lightning_lowbit.kernels.memory import Misfit, checked
from lightning_lowbit.kernels.numbers import CastNumbers, cast_numbers
from lightning_lowbit.quant.blocks import ALL, tile_of
from lightning_lowbit.quant.call import CastCall, is_rounded
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.packed import packed_bytes, per_byte
from lightning_lowbit.quant.scaling import rounding_key
from lightning_lowbit.quant.transforms import rotated_shape, rotation_factors

SUMS = 512  # programs that measure a mean

_OF_PRODUCTS = "columns of products"  # how a factor spreads
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


class Form:
    """The form in which a kernel is compiled: its name, the constants in it, and how many warps a program has.

    ``launchers`` are what Triton has compiled in this form, by the traits of the arguments.
    """

    def __init__(self, kernel: str, constants: dict[str, Any], warps: int = 4) -> None:
        self.kernel, self.constants, self.warps = kernel, constants, warps
        self.launchers: dict[tuple[object, ...], Callable[..., Any]] = {}


class Launch(NamedTuple):
    """One launch of a kernel: ``arguments`` are tensors and numbers, in an order that its form decides."""

    form: Form
    programs: int
    arguments: dict[str, Any]

    @property
    def kernel(self) -> str:
        return self.form.kernel

    @property
    def constants(self) -> dict[str, Any]:
        return self.form.constants

    @property
    def warps(self) -> int:
        return self.form.warps


def launch(kernel: str, programs: int, arguments: dict[str, Any], constants: dict[str, Any], warps: int = 4) -> Launch:
    """Returns a launch; those with equal constants share a form."""
    return Launch(_form(kernel, warps, tuple(constants.items())), programs, arguments)


@cache
def _form(kernel: str, warps: int, constants: tuple[tuple[str, Any], ...]) -> Form:
    return Form(kernel, dict(constants), warps)


def cast_launch(
    x: Tensor, call: CastCall, amax: Tensor | None, sums: Tensor | None, values: Tensor, factor: Tensor
) -> Launch:
    """Writes the operand ``values`` and its ``factor``.

    Args:
        x: the matrix, which is rotated before if the call has a rotation.
        call: how it is cast.
        amax: of the matrix, or of each row for a second level per row; None where it is not needed.
        sums: of :func:`sums_launch`, or None.
        values, factor: new tensors.
    """
    cast, dim, rotation = call.cast, call.dim, call.rotation
    group = 0 if rotation is None else len(rotation)
    lines = lines_of(x, call)
    kind = (x.dtype, values.dtype, is_transposed(x), group, call.in_fours(x))
    form, size = form_of_cast(cast.spec, dim, *kind, is_transposed(values), lines)
    arguments = {
        "x": x,
        "values": as_bytes(values),
        "factor": factor,
        **_outside(x, call, amax, amaxes_of_lines(x, call)),
        **_layout(x, rotation, dim),
    }
    counts = _counts(values, size)
    if form.kernel == "cast_tensor":
        arguments["sums"] = sums
    programs = counts[0] * counts[1] if form.kernel != "cast_rows" else counts[1 - form.constants["AXIS"]]
    return Launch(form, max(programs, 1), arguments)


@cache
def form_of_cast(
    spec: str,
    dim: int,
    source: torch.dtype,
    dtype: torch.dtype,
    transposed: bool,
    group: int,
    fours: bool,
    across: bool = False,
    lines: int = 0,
) -> tuple[Form, tuple[int, int]]:
    """Returns the form of a cast from the dtype ``source`` to ``dtype``, rotated in groups unless their size is 0, and
    the rows and columns of a program. ``fours`` is :meth:`CastCall.in_fours`, ``lines`` :func:`lines_of`; ``across``
    values lie along columns."""
    cast = Cast.from_spec(spec)
    tile, constants = tile_of(cast, dim, 2), {"CAST": cast_numbers(cast, fours), "DTYPE": dtype}
    if across:
        constants["ORDER"] = 0
    if tile == (ALL, ALL):
        size = tile_sides(transposed or across)
        return Form("cast_tensor", {**constants, "TILE": size, "SUMS": SUMS}), size
    if ALL in tile:
        axis = tile.index(ALL)
        if lines and lines <= LARGEST_LINE:
            size, warps = line_tile(axis, lines)
            return Form("cast_tensor", {**constants, "TILE": size, "SUMS": SUMS, "AXIS": axis}, warps), size
        lines, step, warps = 1, 1024, 4
        if transposed == (axis == 1):  # across memory: 32 KiB in flight
            lines, step, warps = (32, 256, 8) if source == torch.float32 else (32, 512, 16)
        size = (lines, step) if axis == 1 else (step, lines)
        return Form("cast_rows", {**constants, "AXIS": axis, "TILE": size}, warps), size
    padded = padded_sides(tile)
    rows, columns, warps = block_tile(transposed, padded, is_light=not group and cast.scale.four_over_six is None)
    if corrected := cast.scale.correction:  # whole groups in a program
        rows, columns, warps = (corrected, 1024 // corrected, 1) if tile[1] == 1 else (2048 // corrected, corrected, 2)
    if group:
        rows, columns = whole_groups(rows, columns, group, dim)
        constants["ROTATION"] = constants_of_rotation(group, dim)
    blocks = rows // padded[0], columns // padded[1]
    through = source if is_rounded(source, cast) else dtype
    constants |= {"THROUGH": through, "SIDES": tile, "PADDED": padded, "BLOCKS": blocks}
    return Form("cast_blocks", constants, warps), (tile[0] * blocks[0], tile[1] * blocks[1])


def both_launch(x: Tensor, calls: tuple[CastCall, CastCall], amax: Tensor | None, operands: Sequence[Tensor]) -> Launch:
    """Writes the operands with blocks along rows and along columns, each as values and factor."""
    sides = block_size(calls[0].cast), block_size(calls[1].cast)
    size = max(sides[1], 16), max(sides[0], 64)
    arguments: dict[str, Any] = {"x": x}
    constants: dict[str, Any] = {"SIDES": sides, "TILE": size}
    for name, call, values, factor in zip(("row", "column"), calls, operands[::2], operands[1::2], strict=True):
        outside = _outside(x, call, amax)
        arguments |= {f"values_{name}": values, f"factor_{name}": factor}
        arguments |= {f"key_{name}": outside["key"], f"amax_{name}": outside["amax"]}
        through = x.dtype if is_rounded(x.dtype, call.cast) else values.dtype
        numbers = {"CAST": cast_numbers(call.cast, call.in_fours(x)), "DTYPE": values.dtype, "THROUGH": through}
        constants |= {f"{key}_{name.upper()}": value for key, value in numbers.items()}
    warps = min(size[0] * size[1] // 1024, 8)  # one warp reduces along columns without shared memory
    return launch("cast_both", _programs(x, size), {**arguments, **_layout(x)}, constants, warps)


def pack_launch(x: Tensor, call: CastCall, amax: Tensor | None, data: Tensor, factor: Tensor) -> Launch:
    """Writes codes and block scales to ``data``, uint8, and the scale of the matrix."""
    cast, dim = call.cast, call.dim
    checked("codes and scales", data, torch.uint8, packed_bytes(x.shape[0], x.shape[1], cast, dim), x.device)
    sides = tile_of(cast, dim, 2)
    rows, columns, warps = block_tile(is_transposed(x), sides, is_light=cast.scale.four_over_six is None)
    arguments = {
        "x": x,
        "codes": data,
        "scales_at": data[packed_codes(x.shape, cast) :],
        "factor": factor,
        **_outside(x, call, amax),
        **_layout(x),
    }
    constants = {"CAST": _coded(cast, call.in_fours(x)), "SIDES": sides}
    constants["BLOCKS"] = (rows // sides[0], columns // sides[1])
    return launch("pack_blocks", _programs(x, (rows, columns)), arguments, constants, warps)


def layout_launch(
    x: Tensor, call: CastCall, amax: Tensor | None, codes: Tensor, scales: Tensor, factor: Tensor
) -> Launch:
    """Writes codes, scales and the scale of the matrix as :mod:`lightning_lowbit.kernels.layout` has them."""
    matrix = x if call.dim == 1 else x.t()
    form, size = _layout_form(call.cast.spec, call.dim, call.block, is_transposed(matrix), call.in_fours(x))
    arguments = {
        "x": x,
        "codes": as_bytes(codes),
        "scales_at": as_bytes(scales),
        "factor": factor,
        **_outside(x, call, amax),
        **_layout(matrix),
    }
    rows, columns = round_up(matrix.shape[0], 128), round_up(matrix.shape[1], 4 * call.block)
    return Launch(form, -(-rows // size[0]) * -(-columns // size[1]), arguments)


@cache
def _layout_form(spec: str, dim: int, block: int, transposed: bool, fours: bool) -> tuple[Form, tuple[int, int]]:
    """Returns the form of a layout, and the rows and columns of a program, with the contraction axis in the columns.
    ``transposed`` and ``fours`` are :func:`is_transposed` of such a matrix and :meth:`CastCall.in_fours`."""
    cast = Cast.from_spec(spec)
    sides = block_shape(cast, dim)
    rows, columns, warps = block_tile(transposed, sides, is_light=False)
    if sides[0] == 1 and sides[1] <= 32 and cast.scale.four_over_six is None:  # a thread has whole blocks
        rows, columns, warps = (64, 64, 1) if transposed else (8, 256, 1)
    if block == 128:  # which GEMMs take as it is
        rows, columns, warps = (128, 128, 4 if transposed else 8) if sides[0] == 128 else (64, 128, 4)
    constants: dict[str, Any] = {"CAST": _coded(cast, fours), "SIDES": sides, "DIM": dim, "SCALED": block}
    constants["BLOCKS"] = (rows // sides[0], columns // sides[1])
    constants |= {"PADDED": multiples() if block < 128 else (1, 1), "CONTIGUOUS": 0 if transposed else 1}
    return Form("lay_out_blocks", constants, warps), (rows, columns)


def layouts_launch(
    x: Tensor, calls: tuple[CastCall, CastCall], amax: Tensor | None, operands: Sequence[Sequence[Tensor]]
) -> Launch:
    """Writes what :func:`layout_launch` does for blocks along rows and along columns."""
    specs, fours = (tuple(call.cast.spec for call in calls), tuple(call.in_fours(x) for call in calls))
    form = _layouts_form(specs, calls[0].block, is_transposed(x), fours)
    arguments: dict[str, Any] = {"x": x}
    for name, call, (codes, scales, factor) in zip(("row", "column"), calls, operands, strict=True):
        outside = _outside(x, call, amax)
        arguments |= {f"codes_{name}": as_bytes(codes), f"scales_{name}": as_bytes(scales)}
        arguments |= {f"factor_{name}": factor, f"amax_{name}": outside["amax"], f"key_{name}": outside["key"]}
    squares = [round_up(size, 128) // side for size, side in zip(x.shape, form.constants["TILE"], strict=True)]
    return Launch(form, squares[0] * squares[1], {**arguments, **_layout(x)})


@cache
def _layouts_form(specs: tuple[str, ...], block: int, transposed: bool, fours: tuple[bool, ...]) -> Form:
    row, column = (_coded(Cast.from_spec(spec), four) for spec, four in zip(specs, fours, strict=True))
    tile, padded, warps = ((64, 64), multiples(), 1) if block < 128 else ((128, 128), (1, 1), 4)
    constants = {"CAST_ROW": row, "CAST_COLUMN": column, "SIZE": block, "TILE": tile, "SCALED": block}
    constants |= {"PADDED": padded, "CONTIGUOUS": 0 if transposed else 1}
    return Form("lay_out_both", constants, warps)


def unpack_launch(data: Tensor, cast: Cast, dim: int, source: torch.dtype, values: Tensor) -> Launch:
    """Writes ``values`` from the bytes of :func:`pack_launch` for a tensor of the dtype ``source``."""
    size, through = tile_sides(is_transposed(values)), source if is_rounded(source, cast) else values.dtype
    rows, columns = values.shape
    checked("codes and scales", data, torch.uint8, packed_bytes(rows, columns, cast, dim), values.device)
    arguments: dict[str, Any] = {"x": data, "scales_at": data[packed_codes(values.shape, cast) :], "values": values}
    arguments |= {"rows": rows, "columns": columns}
    constants: dict[str, Any] = {"CAST": cast_numbers(cast), "SIDES": tile_of(cast, dim, 2), "TILE": size}
    constants |= {"THROUGH": through, "DTYPE": values.dtype}
    return launch("unpack_blocks", _programs(values, size), arguments, constants)


def _outside(x: Tensor, call: CastCall, amax: Tensor | None, lines: int = 0) -> dict[str, Tensor | None]:
    """Returns the other inputs of a kernel: the amax of the matrix, or of so many lines, key and offset of random
    bits."""
    cast, device = call.cast, x.device
    needs_amax = lines or cast.scale.needs_amax
    key = rounding_key(cast, call.key, device)
    return {
        "amax": checked("an amax", amax, torch.float32, lines or 1, device) if needs_amax else None,
        "key": checked("a key", key, torch.int64, 1, device),
        "offset": checked("an offset", call.offset(x), torch.int32, 3, device),
    }


def _coded(cast: Cast, fours: bool) -> CastNumbers:
    """Returns the numbers of a cast to codes: its elements are rounded alone, since scales go beside them."""
    return cast_numbers(cast, fours)._replace(scaled=False)


def packed_codes(shape: torch.Size, cast: Cast) -> int:
    """Returns the bytes of the codes of a packed matrix."""
    return shape[0] * shape[1] // per_byte(cast.format)


def amax_launch(x: Tensor, amax: Tensor, rotation: Tensor, dim: int) -> Launch:
    """Raises ``amax`` (float32, 0-d, 0 before) to max|x| of the rotated matrix."""
    arguments = {"x": x, "amax": amax.view(torch.int32), "sums": None, **_layout(x, rotation, dim)}
    rows, columns, warps = rotated_tile(is_transposed(x), len(rotation), dim)
    programs = -(-arguments["rows"] // rows) * -(-arguments["columns"] // columns)
    constants = {"TILE": (rows, columns), "ROTATION": constants_of_rotation(len(rotation), dim)}
    return launch("measure", min(programs, 4096), arguments, constants, warps)


def peaks_launch(x: Tensor, amax: Tensor) -> Launch:
    """Raises ``amax`` (float32, 0 before) to max|x| of the matrix (0-d), or of each column."""
    by_column = amax.dim() == 1
    rows, columns, steps, warps = (128, 64, 8, 4) if by_column else (16, 1024, 1, 8)
    checked("an amax", amax, torch.float32, x.shape[1] if by_column else 1, x.device)
    arguments = {"x": x, "amax": amax.view(torch.int32), **_layout(x)}
    constants = {"TILE": (rows, columns), "STEPS": steps, "BY_COLUMN": by_column}
    return launch("measure_peaks", _programs(x, (rows * steps, columns)), arguments, constants, warps)


def rotation_launch(x: Tensor, rotation: Tensor, dim: int, values: Tensor) -> Launch:
    rows, columns, warps = rotated_tile(is_transposed(x), len(rotation), dim)
    arguments = {"x": x, "values": values, **_layout(x, rotation, dim)}
    constants = {"TILE": (rows, columns), "ROTATION": constants_of_rotation(len(rotation), dim)}
    return launch("rotate", _programs(values, (rows, columns)), arguments, constants, warps)


def constants_of_rotation(size: int, dim: int) -> tuple[int, int, float, float]:
    return (dim, size, *rotation_factors(size))


def bytes_launch(x: Tensor, result: Tensor) -> Launch:
    """Copies a matrix of one-byte elements of any strides into a larger contiguous one, with zeros around it."""
    size = (128, 128) if is_transposed(x) else (16, 512)
    arguments = {"x": x.view(torch.uint8), "result": result.view(torch.uint8), **_layout(x)}
    arguments |= {"height": result.shape[0], "width": result.shape[1]}
    return launch("pad_bytes", _programs(result, size), arguments, {"TILE": size})


def sums_launch(x: Tensor, sums: Tensor) -> Launch:
    """Writes sums of magnitudes, float64 ``[SUMS]``."""
    arguments = {"x": x, "amax": None, "sums": sums, **_layout(x)}
    return launch("measure", SUMS, arguments, {"TILE": (64, 64) if is_transposed(x) else (4, 1024)})


def scale_and_round_launch(product: Tensor, factors: list[Tensor], bias: Tensor | None, result: Tensor) -> Launch:
    others = [*factors, *[None] * (2 - len(factors)), bias]
    size = tile_sides(is_transposed(product))
    arguments: dict[str, Any] = {"x": product}
    for name, tensor in zip(("first", "second", "bias"), others, strict=True):
        arguments[name] = None if tensor is None else tensor.contiguous()
    spread = tuple(_axes(tensor) for tensor in others)
    rows, columns = product.shape
    sizes = {"": 1, "rows": rows, "columns": columns, "both": rows * columns}
    if counts := {len(tensor) for tensor in others if tensor is not None and _axes(tensor) == _OF_PRODUCTS}:
        count = counts.pop()
        if counts or rows % count:
            raise Misfit(f"Kernels need factors of products with as many rows each; got {count} of {rows} rows.")
        arguments["product_rows"], sizes[_OF_PRODUCTS] = rows // count, count * columns
    for name, axes in zip(("first", "second", "bias"), spread, strict=True):
        if (tensor := arguments[name]) is not None:
            checked("a factor or bias", tensor, tensor.dtype, sizes[axes], product.device)
    constants = {"SPREAD": spread, "TILE": size, "DTYPE": result.dtype}
    arguments |= {"result": result, **_layout(product)}
    return launch("scale_and_round", _programs(product, size), arguments, constants)


def block_size(cast: Cast) -> int:
    """Elements that share a scale along the contraction axis; 0 for tiles, rows and tensors."""
    return cast.scale.block if isinstance(cast.scale.block, int) else 0


def is_transposed(x: Tensor) -> bool:
    """Returns whether memory is contiguous along columns and not along rows."""
    return x.stride(0) == 1 and x.stride(1) != 1


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns elements and scales of one byte as bytes, which the kernels write."""
    return tensor.view(torch.uint8) if tensor.dtype in _BYTES else tensor


def _layout(x: Tensor, rotation: Tensor | None = None, dim: int = 1) -> dict[str, Any]:
    """Sizes and strides; with a rotation the sizes of the rotated matrix, and the signs and sizes in memory."""
    strides = {"row_stride": x.stride(0), "column_stride": x.stride(1)}
    if rotation is None:
        return {"rows": x.shape[0], "columns": x.shape[1], **strides}
    rows, columns = rotated_shape(x.shape, rotation, dim)
    signs = checked("signs", rotation, torch.float32, len(rotation), x.device)
    source = {"signs": signs, "source_rows": x.shape[0], "source_columns": x.shape[1]}
    return {"rows": rows, "columns": columns, **strides, **source}


def _counts(x: Tensor, size: tuple[int, int]) -> tuple[int, int]:
    return -(-x.shape[0] // size[0]), -(-x.shape[1] // size[1])


def _programs(x: Tensor, size: tuple[int, int]) -> int:
    return max(math.prod(_counts(x, size)), 1)


def _axes(tensor: Tensor | None) -> str:
    """Returns how a factor or a bias spreads over a matrix: "", "rows", "columns", "columns of products" or "both"."""
    if tensor is None or tensor.numel() == 1:
        return ""
    if tensor.dim() == 3:
        return _OF_PRODUCTS
    if tensor.dim() == 1 or tensor.shape[0] == 1:
        return "columns"
    return "rows" if tensor.shape[1] == 1 else "both"
