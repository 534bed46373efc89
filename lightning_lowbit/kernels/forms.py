"""Forms and samples of the Triton kernels.

A form holds all on which a compiled kernel's bits may depend; None for arguments that the kernel does not take. A
sample holds arguments of a form, on which the kernel is compared; None for forms that no kernel serves.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbit.kernels.gpu import casts as triton
from lightning_lowbit.kernels.gpu.sizes import lines_of
from lightning_lowbit.quant.call import CastCall
from lightning_lowbit.quant.cast import Cast
from lightning_lowbit.quant.packed import pack, per_byte
from lightning_lowbit.quant.transforms import Hadamard

_KEY = 0x5DEECE66D
_PRODUCTS = (torch.float32, torch.bfloat16, torch.int32, torch.int8)


class CastForm(NamedTuple):
    """The form of a cast: ``group`` is the size of rotated groups or 0, ``block`` and ``fours`` (``in_fours``)
    are those of :class:`CastCall`, ``lines`` is :func:`~lightning_lowbit.kernels.gpu.sizes.lines_of`."""

    spec: str
    dim: int
    source: torch.dtype
    dtype: torch.dtype
    group: int = 0
    block: int = 0
    fours: bool = True
    lines: int = 0

    def __str__(self) -> str:
        rotated = f", rotated by {self.group}" if self.group else ""
        return f"{Cast.from_spec(self.spec)}, dim {self.dim}, from {self.source} to {self.dtype}{rotated}"


def cast_form(x: Tensor, call: CastCall) -> CastForm | None:
    """Returns the form of a cast of a whole matrix, or of a shard that needs no other process."""
    if not 0 < x.numel() < 2**31 or x.dim() != 2 or not call.is_regular(x.device) or not call.stands_alone():
        return None
    form = form_of(x, call)
    return None if form is None else form._replace(lines=lines_of(x, call))


def form_of(x: Tensor, call: CastCall) -> CastForm | None:
    group = 0
    if call.rotation is not None:
        if not triton.rotates(x, call.rotation, call.dim):
            return None
        group = len(call.rotation)
    dtype = call.values_dtype(x.dtype)
    return CastForm(call.cast.spec, call.dim, x.dtype, dtype, group, call.block, call.in_fours(x))


def cast_sample(form: CastForm, device: torch.device) -> tuple[Tensor, CastCall] | None:
    cast, x = Cast.from_spec(form.spec), torch.empty(1, 1, dtype=form.source, device=device)
    if form.group and triton.rotation_obstacle(cast, form.dim) is not None:
        return None
    return _sample(form, device) if triton.covers(cast, x, form.dtype) is None else None


def pair_form(x: Tensor, row: CastCall, column: CastCall) -> tuple[CastForm, CastForm] | None:
    forms = cast_form(x, row), cast_form(x, column)
    return None if forms[0] is None or forms[1] is None else (forms[0], forms[1])


def pair_sample(form: tuple[CastForm, CastForm], device: torch.device) -> tuple[Tensor, CastCall, CastCall] | None:
    row, column = cast_sample(form[0], device), cast_sample(form[1], device)
    if row is None or column is None or triton.covers_both(row[1].cast, column[1].cast) is not None:
        return None
    return *row, column[1]


def pack_form(x: Tensor, call: CastCall) -> CastForm | None:
    """Returns the form of a packed operand: no kernel rotates it, and a byte holds codes of one row."""
    is_whole = call.rotation is None and x.dim() == 2 and x.shape[1] % per_byte(call.cast.format) == 0
    return cast_form(x, call) if is_whole else None


def pack_sample(form: CastForm, device: torch.device) -> tuple[Tensor, CastCall] | None:
    x, call = _sample(form, device)
    return (x, call) if triton.obstacle(device) is None and triton.packs(call.cast, x, form.dim) else None


def unpack_form(data: Tensor, _: Tensor, call: CastCall, shape: torch.Size, source: torch.dtype) -> CastForm | None:
    is_whole = shape.numel() > 0 and shape[1] % per_byte(call.cast.format) == 0
    return CastForm(call.cast.spec, call.dim, source, call.values_dtype(source)) if is_whole else None


def unpack_sample(form: CastForm, device: torch.device) -> tuple[Any, ...] | None:
    if (arguments := pack_sample(form, device)) is None:
        return None
    x, call = arguments
    return *pack(x, call.cast, call.key, None, dim=form.dim), call, x.shape, form.source


def layout_sample(form: CastForm, device: torch.device) -> tuple[Tensor, CastCall] | None:
    x, call = _sample(form, device, rows=72)
    return (x, call) if triton.lays_out(call.cast, x, form.block, form.dim) else None


def layouts_sample(form: tuple[CastForm, CastForm], device: torch.device) -> tuple[Any, ...] | None:
    (x, row), (_, column) = (_sample(one, device, rows=72) for one in form)
    return (x, row, column) if triton.lays_out_both(row, column, x) else None


class RotationForm(NamedTuple):
    """The form of a matrix to rotate or measure: the size of groups (0 for none) and their dimension."""

    group: int
    dim: int
    dtype: torch.dtype
    is_measured: bool = False  # by a kernel, since it is large

    def __str__(self) -> str:
        return f"groups of {self.group}, dim {self.dim}, {self.dtype}" if self.group else f"{self.dtype}"


def rotation_form(x: Tensor, rotation: Tensor | None, dim: int) -> RotationForm | None:
    """Returns the form of a matrix that kernels may rotate by these signs, or measure."""
    if x.numel() == 0 or x.dim() != 2 or (rotation is not None and not triton.rotates(x, rotation, dim)):
        return None
    if rotation is None:
        return RotationForm(0, 1, x.dtype, x.numel() >= triton.MEASURED)
    return RotationForm(len(rotation), dim, x.dtype)


def rotation_sample(form: RotationForm, device: torch.device) -> tuple[Any, ...] | None:
    group, dim, dtype, is_measured = form
    x, *_ = _normal((64, 160), device=device)
    x = x.repeat(1, -(-triton.MEASURED // x.numel())) if is_measured else x
    signs = Hadamard(group).diagonal(None, device) if group else None
    return (x.to(dtype), signs, dim) if triton.obstacle(device) is None else None


def signs_form(keys: Tensor, size: int) -> int | None:
    """Returns the size of the groups whose signs are drawn by keys."""
    return size if keys.dtype == torch.int64 and keys.numel() and keys.is_contiguous() else None


def signs_sample(form: int, device: torch.device) -> tuple[Tensor, int] | None:
    return (torch.tensor([_KEY, -1], device=device), form) if triton.obstacle(device) is None else None


def bytes_form(x: Tensor, rows: int, columns: int) -> bool | None:
    """Returns True for a matrix that must be copied; None where it need not, and for what has other elements."""
    if x.is_contiguous() and not rows and not columns:
        return None
    return True if x.dim() == 2 and x.itemsize == 1 and 0 < x.numel() < 2**31 else None


def bytes_sample(form: bool, device: torch.device) -> tuple[Tensor, int, int] | None:
    x = torch.arange(40 * 150, device=device).view(40, 150).to(torch.uint8).t()
    return (x, 10, 8) if triton.obstacle(device) is None else None


def product_form(product: Tensor, *others: object) -> torch.dtype | None:
    """Returns the dtype of a product whose results are rounded."""
    return product.dtype if product.numel() and product.dtype in _PRODUCTS else None


def product_sample(form: torch.dtype, device: torch.device) -> tuple[Any, ...] | None:
    product, rows, columns, bias = _normal((40, 72), (40, 1), (5, 1, 72), (72,), device=device)
    arguments = (product * 100).to(form), [rows, columns], bias, torch.bfloat16
    return arguments if triton.obstacle(device) is None else None


def amax_sample(form: object, device: torch.device) -> tuple[Any, ...] | None:
    amax, in_force, staged = (torch.ones(shape, device=device) for shape in ((), (6,), (6,)))
    return (amax, in_force, staged, [1, 3]) if triton.obstacle(device) is None else None


def _normal(*shapes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Normal numbers, the same ones on all devices."""
    generator = torch.Generator("cpu").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").to(device) for shape in shapes]


def elements_of(form: CastForm, device: torch.device, *sizes: int) -> Tensor:
    """Returns rows ``[*sizes, 160]`` of widely different magnitudes. Where rows begin within four elements that share a
    hash, they have 158. All are finite, in float16 and rotated, too: NaN equals nothing."""
    [(normal, exponents)] = _normal((2, *sizes, 160 if form.fours else 158), device=torch.device("cpu"))
    largest = torch.finfo(form.source).max / 16  # sums of 128 elements grow by sqrt(128)
    return (normal * (4 * exponents).exp()).clamp(-largest, largest).to(device, form.source)


def _sample(form: CastForm, device: torch.device, rows: int = 64) -> tuple[Tensor, CastCall]:
    """Returns a matrix ``[rows, 160]``, or one with lines of the form, and how it is cast."""
    x, dim = elements_of(form, device, rows), form.dim % 2
    if form.lines > 0:
        many = (form.lines // x.shape[dim] - 1) | 1  # odd, so that `fours` stays
        x = elements_of(form, device, rows * many)
        x = x if dim == 0 else x.view(rows, -1)
    if form.lines and (form.lines > 0) == (dim == 0):  # columns lie in memory
        x = x.t().contiguous().t()
    key = torch.tensor(_KEY, device=device)
    signs = Hadamard(form.group).diagonal(None, device) if form.group else None
    return x, CastCall(Cast.from_spec(form.spec), form.dim, key, None, form.dtype, None, signs, form.block)
