"""The Triton kernels as PTX, the code that Triton's compiler makes for GPUs, run by an emulator: equal to the bit."""

import importlib.util
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_lowbit import Cast, Scale
from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.nn import PRESETS
from lightning_lowbit.optim.adam import ClippedAdam
from tests.benchmarks.kernels import compile_for
from tests.kernels import interpreted, passes, steps, test_triton
from tests.kernels.emulator.ptx import Kernel, Memory
from tests.kernels.interpreted import Case
from tests.optim.parameters import make_parameters, set_gradients
from tests.quant.tensors import NVFP4

ARCH = 90

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def emulate(launch, reachable=()):
    """Runs a launch on tensors of the CPU, and on those that are ``reachable`` by addresses in the argument ``x``."""
    compiled, table = compile_for(launch, ARCH), launch.arguments["x"]
    kernel, constants = getattr(gpu._kernels()[0], launch.kernel), gpu.compiled_for(launch, ARCH)
    tensors = [*reachable, *(value for value in launch.arguments.values() if isinstance(value, Tensor))]
    tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    places, end = {}, 256
    for start, tensor in tensors.items():
        places[start] = slice(end, end + tensor.untyped_storage().nbytes())
        end = -(-places[start].stop // 256) * 256 + 256
    memory = Memory(end)
    for start, tensor in tensors.items():
        memory.bytes[places[start]] = _bytes(tensor)

    def address(tensor):
        return places[tensor.untyped_storage().data_ptr()].start + tensor.storage_offset() * tensor.itemsize

    addresses = {tensor.data_ptr(): address(tensor) for tensor in reachable}
    if reachable:
        here = table.detach().clone().apply_(lambda number: addresses.get(number, number))
        memory.bytes[address(table) : address(table) + here.nbytes] = _bytes(here)
    arguments = []
    for name in kernel.arg_names:
        value = launch.arguments.get(name)
        if isinstance(value, Tensor):
            arguments.append(address(value))
        elif name not in constants and value is not None and value != 1:
            arguments.append(value)
    with np.errstate(all="ignore"):
        Kernel(compiled.asm["ptx"]).run(launch.programs, arguments, memory, compiled.metadata.shared + 16)
    for start, tensor in tensors.items():
        if not (reachable and tensor is table and tensor.dtype == torch.int64):  # with the addresses of the host
            _bytes(tensor)[:] = memory.bytes[places[start]]


def _bytes(tensor):
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(gpu, "run", emulate)
    monkeypatch.setattr(gpu, "obstacle", lambda device: None)


def sample(rows, columns, dtype=torch.bfloat16):
    """Rows of very different sizes, with a block of zeros, an infinity and what is not a number."""
    x = test_triton.sample(rows, columns, dtype)
    x[-1, 0], x[-1, -1] = float("nan"), float("inf")
    return x


@pytest.mark.parametrize("cast", {cast: None for name in PRESETS for cast in test_triton.casts_of(name)}, ids=str)
def test_all_casts_of_presets(cast):
    amax = 3.0 if cast.scale.needs_amax else None
    assert interpreted.differences([Case(cast, dim, sample(48, 272), amax) for dim in (0, 1)]) == []


# Tests for the interpreter, of whose cases the emulator runs some: shapes and strides of all kinds.
OTHERS = [
    *(partial(test_triton.test_packed_operands_of_presets, preset=name) for name in ("nvfp4", "nvfp4-nvidia", "mxfp8")),
    test_triton.test_elements_in_the_dtypes_of_native_gemms,
    *(
        partial(test, part=slice(None))
        for test in (
            test_triton.test_operands_of_native_gemms,
            test_triton.test_memory_in_any_order,
            test_triton.test_two_operands_from_one_read,
            test_triton.test_factors_and_bias_behind_gemms,
            test_triton.test_rare_scales,
            test_triton.test_rotated_operands,
        )
    ),
    *(partial(test_triton.test_random_casts_shapes_strides_and_dtypes, seed=seed) for seed in range(4)),
]


@pytest.mark.parametrize("test", OTHERS)
def test_some_of_what_the_interpreter_runs(test):
    test(run=lambda compare, cases: compare(random.Random(0).sample(cases, min(len(cases), 10))))


@pytest.mark.parametrize("arch", [80, 100])
def test_other_architectures(monkeypatch, arch):
    monkeypatch.setattr("tests.kernels.test_triton_ptx.ARCH", arch)
    for cast in (NVFP4.replace(rounding="stochastic"), Cast("e4m3", Scale("fp32", "row"))):
        for dim in (0, 1):
            assert interpreted.differences([Case(cast, dim, sample(48, 272))]) == []


def test_operands_of_stacks():
    texts, count = passes.differences_of_stacks(("nvfp4", "nvfp4-nvidia", "mxfp8", "fp8-row"))
    assert texts == [] and count > 15
    stochastic = NVFP4.replace(rounding="stochastic")
    assert passes.differences_of_long_stacks((stochastic, Cast("e4m3", Scale("fp32", "row")))) == ([], 4)


def test_operands_of_native_gemms_by_instructions_for_codes(monkeypatch):
    """Blackwell's, with ties, what saturates, infinities from tiny scales, and zeros of both signs."""
    monkeypatch.setattr("tests.kernels.test_triton_ptx.ARCH", 100)
    x = sample(48, 272)
    x[1, :48], x[2, 16:32] = torch.linspace(-6, 6, 49)[:48], 1e30 * (-1.0) ** torch.arange(16)
    x[3, ::2], x[4, :16] = -0.0, torch.tensor([-0.1, 6] * 8)
    casts = (
        NVFP4,
        NVFP4.replace(rounding="stochastic"),
        Cast("e2m1", Scale("e8m0", 32)),
        Cast("e4m3", Scale("e8m0", 32)),
    )
    for cast in casts:
        for dim in (0, 1):
            for matrix, amax in ((x, None), (x.nan_to_num(1.0, 1.0, 1.0), None), (x.float(), 3e38)):
                case = Case(cast, dim, matrix, amax if cast.scale.needs_amax else None)
                block = 16 if cast.scale.format == "e4m3" else 32
                assert interpreted.differences_of_layout([(case, block)]) == []


def step_twice(options, dtype, emulated):
    parameters = make_parameters(dtype, [(), (300,), (2, 3, 130), (24, 128)])
    optimizer = ClippedAdam(parameters, lr=1e-2, **options)

    def of_all():
        return [tensor for p in parameters for tensor in (p.detach(), *optimizer.state[p].values())]

    def run(launch):
        emulate(launch, [*of_all(), *(p.grad for p in parameters if p.grad is not None)])

    for seed in range(2):
        set_gradients(parameters, seed)
        with steps.launched(run) if emulated else backend("eager"):
            optimizer.step()
    return of_all()


@pytest.mark.parametrize("options, dtype", steps.CASES, ids=["fp32", "SpikeClip and masters", "FP8"])
def test_ptx_makes_the_steps_of_plain_torch(options, dtype):
    place = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 0.0, torch.uint8: 0.0, torch.int64: 0.0}
    for found, wanted in zip(*(step_twice(options, dtype, emulated) for emulated in (True, False)), strict=True):
        error = (found.double() - wanted.double()).abs() / wanted.double().abs().amax().clamp(min=1e-30)
        assert (error <= place[found.dtype]).double().mean() >= 0.999, f"{found} {wanted}"
