"""Devices with native GEMMs: by their capability, and by a trial.

GEMMs depend on the GPU, the libraries and how torch was built. A GPU that should have one multiplies two small matrices
once, in each way in which layers call it, with scales that differ from block to block or row to row. It has the GEMM if
the results are the emulation's.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from lightning_lowbit._torch import has_amx, has_vnni
from lightning_lowbit.compilation import refuse_in_capture
from lightning_lowbit.kernels.cpu.gemms import INSTRUCTIONS, instructions
from lightning_lowbit.nn.native.gemms import block_product, fp8_product, int8_product, results
from lightning_lowbit.nn.native.operand import BlockOperand, block_operand
from lightning_lowbit.nn.native.table import BLOCK_SCALED, NATIVE
from lightning_lowbit.quant import Cast, Scale, quantize_operand

_MX4, _MX8 = Cast("e2m1", Scale("e8m0", 32)), Cast("e4m3", Scale("e8m0", 32))
_NV4 = Cast("e2m1", Scale("e4m3", 16, two_level=True))
_ROWS, _TILES = (Cast("e4m3", Scale("fp32", block)) for block in (128, (128, 128)))
_WHOLE, _BY_ROW = (Cast("e4m3", Scale("fp32", block)) for block in ("tensor", "row"))
_WIDE, _WIDE_BY_ROW = (cast.replace(element="e5m2") for cast in (_WHOLE, _BY_ROW))
_INTEGERS = Cast("int8", Scale("fp32", "row"))

# The casts of a trial, left and right.
_SAMPLES = {
    "nvfp4": [(_NV4, _NV4)],
    "mxfp4": [(_MX4, _MX4)],
    "mxfp8": [(_MX8, _MX8)],
    "fp8-blockwise": [(_ROWS, _TILES), (_ROWS, _ROWS)],
    "fp8": [(_WHOLE, _WHOLE), (_WIDE, _WHOLE), (_WHOLE, _WIDE), (_BY_ROW, _BY_ROW), (_WIDE_BY_ROW, _BY_ROW)],
    "int8": [(_INTEGERS, _INTEGERS)],
}

# Of the norm of a result: bfloat16 rounds to 2^-9, a misplaced scale changes all of it.
_TOLERANCE = 2.0**-6

_declarations: dict[str, Collection[str]] = {}  # kinds by the type of a device, of `declared`


@contextmanager
def declared(device_type: str, kinds: Collection[str]) -> Iterator[None]:
    """Takes devices of a type as ones that declare native GEMMs of these kinds and no others, within this context.

    For a device that the table does not know, or that computes a kind faster in emulation. Block-scaled GEMMs are still
    tried. A layer remembers its choice: enter the context before its first pass.

    Args:
        device_type: such as ``"cuda"``.
        kinds: keys of ``NATIVE``; a ``ValueError`` names others.

    Examples:
        >>> with declared("cuda", {"fp8"}):
        ...     trainer.fit(model)
    """
    if unknown := set(kinds) - set(NATIVE):
        raise ValueError(f"Unknown kinds of native GEMMs {sorted(unknown)}: choose among {', '.join(NATIVE)}.")
    previous = dict(_declarations)
    _declarations[device_type] = kinds
    try:
        yield
    finally:
        _declarations.clear()
        _declarations.update(previous)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it cannot trace a device's name
def native_obstacle(device: torch.device, kind: str) -> str | None:
    """Returns why a device cannot compute GEMMs of a kind (a key of ``NATIVE``) natively, in words; None if it can."""
    if (kinds := _declarations.get(device.type)) is not None:
        obstacle = None if kind in kinds else f"{device.type!r} is declared to have none"
    elif kind == "cpu":
        return _cpu_obstacle(device.type)
    elif (obstacle := _without_gpu(device.type, kind)) is not None:
        return obstacle
    else:
        obstacle = _declared_obstacle(device, kind)
    if obstacle is None and (kind in BLOCK_SCALED or device.type == "cuda") and kind in _SAMPLES:
        obstacle = _trial_obstacle(device, kind)
    return None if obstacle is None else f"{NATIVE[kind].needs}; {obstacle}"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def slower_because(kind: str) -> str | None:
    """Returns why native GEMMs of a kind are slower than emulated ones on their device; None if they are faster. The
    instruction set alone decides, so that bits never depend on a timing; ``nn/layers/speed.py`` measures."""
    if kind != "cpu" or "cpu" in _declarations:
        return None
    if has_amx():
        return "this CPU has tile units (AMX), whose bf16 GEMMs are faster"
    return "this CPU multiplies bytes without instructions of its own" if instructions() == INSTRUCTIONS[0] else None


@cache
def _cpu_obstacle(device_type: str) -> str | None:
    if device_type != "cpu":
        return f"GEMMs of codes are those of CPUs; the device is {device_type!r}"
    return None if instructions() else f"{NATIVE['cpu'].needs}, which cannot be built here"


@cache
def _without_gpu(device_type: str, kind: str) -> str | None:
    if device_type == "cuda" or (device_type, kind) == ("cpu", "int8"):
        return None
    return f"{NATIVE[kind].needs}; the device is {device_type!r}"


def _declared_obstacle(device: torch.device, kind: str) -> str | None:
    if device.type == "cpu":
        return None if has_vnni() else "this CPU has none"
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return _amd_obstacle(device, name, kind)
    versions = NATIVE[kind].nvidia
    assert versions is not None  # of a GPU
    (least, first_too_new), capability = versions, torch.cuda.get_device_capability(device)
    if capability < least or (first_too_new is not None and capability >= first_too_new):
        return f"{name} has {capability[0]}.{capability[1]}"
    return None


def _amd_obstacle(device: torch.device, name: str, kind: str) -> str | None:
    if not NATIVE[kind].amd:
        return f"{name} is AMD's, which has not been tried"
    architecture = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    if architecture not in NATIVE[kind].amd:
        return f"{name} is {architecture}"
    if hasattr(ScalingType, "BlockWiseBlk32Ue8m0_32_8_EXT"):  # torch for ROCm 7.13 and later
        return f"this torch takes the scales of {name} in a layout that is not written yet"
    return None


@cache
def _trial_obstacle(device: torch.device, kind: str) -> str | None:
    """Computes small GEMMs on a device, and returns what is wrong with one; None if all are the emulation's."""
    refuse_in_capture(f"native GEMMs ({kind})")
    for casts in _SAMPLES[kind]:
        generator = torch.Generator("cpu").manual_seed(0)
        matrices = []
        for rows in (48, 144):
            normal = torch.randn(rows, 384, generator=generator, device="cpu")
            sizes = torch.randn(rows, 24, generator=generator, device="cpu").exp()
            matrices.append((normal * sizes.repeat_interleave(16, 1)).to(device))
        with torch.no_grad():
            trials = _of_blocks if kind in BLOCK_SCALED else _of_rows_and_tensors
            for multiply, expected in trials(kind, matrices, casts):
                try:
                    result = multiply().double().cpu()
                except torch.OutOfMemoryError:  # which says nothing of the GEMM
                    raise
                except (RuntimeError, ValueError) as error:
                    answer = str(error).strip() or type(error).__name__
                    return f"torch refuses it on {_name(device)}: {answer.splitlines()[0][:160]}"
                error_norm = float((result - expected).norm() / expected.norm())
                if not error_norm <= _TOLERANCE:
                    return f"{_name(device)} was asked, and its result is off by {error_norm:.2g} of its norm"
    return None


_Trials = Iterator[tuple[Callable[[], Tensor], Tensor]]  # products to try, and what they should be, float64 on the CPU


def _of_blocks(kind: str, matrices: list[Tensor], casts: tuple[Cast, Cast]) -> _Trials:
    """Yields the products in each dtype; those in float32 serve layers with a bias."""
    left, right = (block_operand(x, cast, kind, 1) for x, cast in zip(matrices, casts, strict=True))
    a, b = (
        operand.values.double() * (1 if operand.factor is None else operand.factor.double())
        for operand in (left.decoded(torch.float32), right.decoded(torch.float32))
    )
    for dtype in results(kind):
        yield partial(_with_factors, left, right, dtype), (a @ b.t()).cpu()


def _with_factors(left: BlockOperand, right: BlockOperand, dtype: torch.dtype) -> Tensor:
    result, factors = block_product(left, right, dtype)
    for factor in factors:
        result = result * factor
    return result


def _of_rows_and_tensors(kind: str, matrices: list[Tensor], casts: tuple[Cast, Cast]) -> _Trials:
    """Yields the products rounded within the GEMM, with a bias, and behind it; those in FP8 by both accumulations."""
    (a, a_factor), (b, b_factor) = (
        quantize_operand(x, cast, 1, dtype=cast.grid.gemm_dtype) for x, cast in zip(matrices, casts, strict=True)
    )
    assert a_factor is not None and b_factor is not None
    bias = 100 * matrices[1].mean(1).bfloat16()
    expected = (a.double() * a_factor.double()) @ (b.double() * b_factor.double()).t() + bias.double()
    for dtype, fast in product((torch.bfloat16, torch.float32), (False, True) if kind == "fp8" else (False,)):
        multiply = partial(fp8_product, fast=fast) if kind == "fp8" else int8_product
        yield partial(multiply, (a, b.t()), (a_factor, b_factor.t()), bias=bias, dtype=dtype), expected.cpu()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else repr(device.type)
