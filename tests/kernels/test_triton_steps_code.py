"""The Triton kernels of the optimizers as code for GPUs: what it needs, and PTX in the emulator against plain torch."""

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels.gpu.launches import Launch
from lightning_lowbit.optim.guarded_adam import GuardedAdam
from tests.benchmarks import kernels
from tests.kernels import steps
from tests.kernels.test_triton_aot import wrong_arithmetic
from tests.kernels.test_triton_ptx import emulate
from tests.optim.parameters import make_parameters, set_gradients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
CLIPPED = {"element_clip": "ada_clip", "norm_clip": "ada_gn", "weight_decay": 0.1}
SPIKES = {"element_clip": "spike_clip", "spike_threshold": 0.5, "moments": "fp8"}
ALIGNED = [(64,), (64, 128)]
CASES = [
    (CLIPPED, torch.float32),
    ({**SPIKES, "master_weights": "fp16"}, torch.bfloat16),
    ({**CLIPPED, "moments": "fp8"}, torch.bfloat16),
]


def launches(shapes: Sequence[tuple[int, ...]]) -> list[Launch]:
    """Each kernel once with the same constants."""
    found: dict[str, Launch] = {}
    for options, dtype in CASES:
        parameters = make_parameters(dtype, shapes)
        set_gradients(parameters, seed=0)
        with steps.launched(lambda launch: found.setdefault(f"{launch.kernel} {launch.constants}", launch) and None):
            GuardedAdam(parameters, **options).step()
    return list(found.values())


@pytest.mark.parametrize("arch", kernels.ARCHITECTURES)
def test_kernels_compile_and_nothing_spills(arch: int) -> None:
    """Memory that is not aligned takes an address for each element."""
    for shapes, most in ((ALIGNED, 96), ([(33, 130)], 224)):
        for launch in launches(shapes):
            code = kernels.resources_of(launch, arch)
            assert code.spilled == 0 and code.registers <= most, f"{launch.kernel}, {launch.constants}: {code}"


def test_arithmetic_is_that_of_ieee_and_memory_moves_16_bytes_at_a_time() -> None:
    """Fused are the interpolation, as in torch, and an exact product."""
    for launch in launches(ALIGNED):
        ptx = kernels.compile_for(launch, 90).asm["ptx"]
        found = wrong_arithmetic(ptx, fused=launch.kernel == "update_shards")
        assert not found, f"{launch.kernel}: {found}"
        wide = len(re.findall(r"(?:ld|st)\.global\.v4\.b32", ptx))
        assert wide or launch.kernel == "sum_partials", f"{launch.kernel}: {wide}"


def step_twice(options: dict[str, Any], dtype: torch.dtype, emulated: bool) -> list[Tensor]:
    """Parameters and their state."""
    parameters = make_parameters(dtype, [(), (300,), (2, 3, 130), (24, 128)])
    optimizer = GuardedAdam(parameters, lr=1e-2, **options)

    def of_all() -> list[Tensor]:
        return [tensor for p in parameters for tensor in (p.detach(), *optimizer.state[p].values())]

    def run(launch: Launch) -> None:
        emulate(launch, [*of_all(), *(p.grad for p in parameters if p.grad is not None)])

    for seed in range(2):
        set_gradients(parameters, seed)
        with steps.launched(run) if emulated else backend("eager"):
            optimizer.step()
    return of_all()


@pytest.mark.parametrize("options, dtype", CASES, ids=["fp32", "SpikeClip and masters", "FP8"])
def test_ptx_makes_the_steps_of_plain_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    place = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 0.0, torch.uint8: 0.0, torch.int64: 0.0}
    for found, wanted in zip(*(step_twice(options, dtype, emulated) for emulated in (True, False)), strict=True):
        error = (found.double() - wanted.double()).abs() / wanted.double().abs().amax().clamp(min=1e-30)
        assert (error <= place[found.dtype]).double().mean() >= 0.999, f"{found} {wanted}"
