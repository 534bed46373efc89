"""A kernel that fails is left to the plain code: the same bits, one warning, whenever and however it fails."""

import importlib.util
import warnings
from functools import partial
from unittest import mock

import pytest
import torch

from lightning_lowbit import Cast, LinearCasts, Scale
from lightning_lowbit.kernels import (
    amax_of,
    backend,
    lay_out_operand,
    operands,
    ops,
    pack_operand,
    packing,
    products,
    quantize_both,
    quantize_operand,
    rotate,
    unpack_operand,
)
from lightning_lowbit.kernels.cpu import library
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.products import scale_and_round
from lightning_lowbit.kernels.windows import Window
from lightning_lowbit.nn.core.watch import stage_and_choose
from lightning_lowbit.quant import Hadamard
from tests.kernels.memory.signs import _flat
from tests.kernels.test_casts import implement, same_bits
from tests.quant.tensors import NVFP4
from tests.tables import each

CPU, KEY = torch.device("cpu"), torch.tensor(2**40 + 5)
DRAWN = NVFP4.replace(rounding="stochastic")
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
SIGNS, FACTORS = Hadamard(16).diagonal(None, CPU), [torch.rand(32, 1), torch.rand(1, 64)]
WINDOW = Window((1,), (1,), (1,), (0,), (0,))
with backend("eager"):
    PACKED = pack_operand(X, DRAWN, 1, KEY)


class Broken(Exception):
    """An error of a compiler, a linker or a driver, each of which has its own class."""


def staged():
    record = torch.zeros(6)
    return [stage_and_choose(torch.zeros(6), record, [1, 3], torch.tensor(3.0)), record]


# By operation, a call that reaches it, and the languages in which it has a kernel.
WAYS = {
    "cast": (operands.CAST, lambda: quantize_operand(X, DRAWN, 0, KEY), ("cpp", "triton")),
    "both": (operands.CAST_BOTH, lambda: quantize_both(X, (NVFP4, DRAWN), (None, KEY), None), ("triton",)),
    "amax": (operands.AMAX, lambda: amax_of(X), ("cpp", "triton")),
    "rotation": (operands.ROTATE, lambda: rotate(X, SIGNS, 1), ("cpp", "triton")),
    "packing": (packing.PACK, lambda: pack_operand(X, DRAWN, 1, KEY), ("cpp", "triton")),
    "unpacking": (packing.UNPACK, lambda: unpack_operand(PACKED, DRAWN, 1, X.shape, X.dtype), ("cpp", "triton")),
    "layout": (packing.LAY_OUT, lambda: lay_out_operand(X, DRAWN, 16, 1, KEY), ("triton",)),
    "results": (
        products.SCALE_AND_ROUND,
        lambda: scale_and_round(X.float(), FACTORS, None, torch.bfloat16),
        ("cpp", "triton"),
    ),
    "delayed amaxes": (products.DELAY, staged, ("cpp", "triton")),
    "patches": (products.ADD_PATCHES, lambda: WINDOW.sums(X, (2, 64, 16)), ("cpp",)),
}
CASES = [(name, language) for name, (_, _, languages) in WAYS.items() for language in languages]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """No kernel has been compared or has failed before the test, nor is it remembered after it."""
    forget(monkeypatch)


def forget(monkeypatch):
    monkeypatch.setattr(ops, "_warned", set())
    for operation in ops._OPERATIONS.values():
        implement(monkeypatch, operation, cpp=operation.cpp)


def plant(monkeypatch, operation, language, error, after):
    """Makes a kernel raise an error after some calls, in which it gives what plain code gives."""
    calls = iter(range(after))

    def kernel(*arguments):
        if next(calls, None) is None:
            raise error
        with backend("eager"):
            return operation.plain(*arguments)

    samples = []
    implement(
        monkeypatch,
        operation,
        **{language: kernel},
        form=lambda *arguments: samples.append(arguments) or "a form",
        sample=lambda form, device: samples[0],
    )


def bits_of(call):
    return [tensor.clone() for tensor in _flat(call())]


@each("name, language", CASES)
@each("after", [0, 1, 2])
def test_plain_code_takes_over(monkeypatch, name, language, after):
    """In the first call (the comparison, in Triton), in the second one, and long after."""
    operation, call, _ = WAYS[name]
    with backend("eager"):
        expected = bits_of(call)
    forget(monkeypatch)
    plant(monkeypatch, operation, language, Broken("no such\n instruction"), after)
    with backend(language), warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(4):
            assert all(map(same_bits, bits_of(call), expected))
    assert len(caught) == 1, [str(warning.message) for warning in caught]
    kernel = f"The {'C++' if language == 'cpp' else 'Triton'} kernel for {operation.name}"
    assert str(caught[0].message).startswith(kernel)
    assert "fails (Broken: no such instruction) on cpu, and is not used there" in str(caught[0].message)


@each("language", ["cpp", "triton"])
@each("error", [KeyboardInterrupt(), torch.OutOfMemoryError("full"), RuntimeError("CUDA error: out of memory")])
def test_what_plain_code_cannot_mend_is_raised(monkeypatch, language, error):
    plant(monkeypatch, operands.CAST, language, error, after=1)
    with backend(language), pytest.raises(type(error)):
        for _ in range(2):
            quantize_operand(X, DRAWN, 1, KEY)


def test_a_triton_kernel_that_differs_from_plain_code_is_not_used(monkeypatch):
    plant(monkeypatch, operands.CAST, "triton", Broken(), after=9)
    right = operands.CAST.triton
    monkeypatch.setattr(operands.CAST, "triton", lambda *arguments: right(*arguments)._replace(factor=torch.ones(())))
    with backend("eager"):
        expected = quantize_operand(X, DRAWN, 1, KEY)
    with backend("triton"), pytest.warns(UserWarning, match="differs from the plain code on cpu"):
        assert all(map(same_bits, quantize_operand(X, DRAWN, 1, KEY), expected))


def test_an_error_of_the_plain_code_too_is_no_fault_of_the_kernel(monkeypatch):
    plant(monkeypatch, operands.CAST, "cpp", Broken(), after=0)
    with backend("cpp"), pytest.raises(ValueError, match="needs a key") as raised:
        quantize_operand(X, DRAWN, 1)
    assert raised.value.__context__ is None, "it is told once"
    assert operands.CAST.cpp is not None


def test_a_failure_of_one_form_leaves_the_others(monkeypatch):
    plain, served = operands.CAST.plain, []

    def kernel(x, *arguments):
        if x.dtype == torch.float32:
            raise Broken
        served.append(x.dtype)
        with backend("eager"):
            return plain(x, *arguments)

    sample = X, operands.CastCall(NVFP4, 1)
    forms = {"form": lambda x, call: x.dtype, "sample": lambda form, device: sample}
    implement(monkeypatch, operands.CAST, triton=kernel, **forms)
    with backend("triton"), pytest.warns(UserWarning, match=r"fails \(Broken: \)") as caught:
        for x in (X, X.float(), X, X.float()):
            quantize_operand(x, NVFP4, 1)
    assert len(caught) == 1 and served == [torch.bfloat16] * 4  # two comparisons


def test_a_graph_is_not_captured_before_a_kernel_was_tried(monkeypatch):
    """Nor afterwards refused: the comparison waits for the device, a launch does not."""
    plant(monkeypatch, operands.CAST, "triton", Broken(), after=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for captured in (True, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        with backend("triton"):
            if captured and not operands.CAST._verdicts:
                with pytest.raises(RuntimeError, match="uses a kernel for operands for the first time"):
                    quantize_operand(X, DRAWN, 1, KEY)
            else:
                quantize_operand(X, DRAWN, 1, KEY)
    assert [*operands.CAST._verdicts.values()] == [True]


def test_launches_that_fail_are_left_to_plain_code(monkeypatch):
    monkeypatch.setattr(gpu, "obstacle", lambda device: None)
    monkeypatch.setattr(gpu, "run", mock.Mock(side_effect=Broken("the driver is gone")))
    calls = {name: WAYS[name][1] for name in WAYS if "triton" in WAYS[name][2]}
    for cast in (NVFP4, DRAWN, Cast("e4m3", Scale("fp32", "row")), LinearCasts.preset("ternary").fprop_w):
        for signs in (None, SIGNS):
            calls[f"{cast}, {signs}"] = partial(quantize_operand, X, cast, 1, KEY, rotation=signs)
    for name, call in calls.items():
        with backend("eager"):
            expected = bits_of(call)
        with backend("triton"), warnings.catch_warnings(action="ignore"):
            assert all(map(same_bits, bits_of(call), expected)), name


@each("error", [OSError("not an ELF file"), ValueError("embedded null"), AttributeError("lowbit_cast")])
def test_a_library_that_cannot_be_loaded_is_left_to_plain_code(monkeypatch, error):
    for name in ("_from_cache", "_build"):
        monkeypatch.setattr(library, name, mock.Mock(side_effect=error))
    assert library._loaded.__wrapped__() == (None, error)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_that_cannot_be_imported_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(gpu, "_kernels", mock.Mock(side_effect=ImportError("libtriton.so: undefined symbol")))
    with pytest.warns(UserWarning, match="plain code on cpu, which is slower"):
        reason = gpu.obstacle.__wrapped__(CPU)
    assert reason == "Triton cannot build its kernels (ImportError: libtriton.so: undefined symbol)"
