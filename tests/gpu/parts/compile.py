"""Every kernel of layers and optimizers compiles and spills nothing; later parts find them in Triton's cache."""

import warnings
from functools import partial

import torch

from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.nn import PRESETS
from lightning_lowbit.optim.adam import ClippedAdam
from tests.benchmarks import kernels
from tests.gpu.memory import with_memory
from tests.gpu.models import faults_of
from tests.gpu.table import Check, Wrong
from tests.kernels import steps
from tests.kernels.test_triton_aot import bounds_of, other_launches
from tests.optim.parameters import make_parameters, set_gradients

SHAPES = (steps.ALIGNED, [(33, 130)])
SOME = 12  # kernels of a rehearsal


def checks(setting):
    compile_ = compiled_here if setting.device == "cuda" else compiled_elsewhere
    launches = [*_launches()] if setting.device == "cuda" else [*_launches(), *_optimizers()]
    for number, (name, launch) in list(enumerate(launches))[:: len(launches) // SOME if setting.is_small else 1]:
        yield Check(f"{number} {launch.kernel}: {name}", partial(compile_, name, launch))
    for shapes in SHAPES if setting.device == "cuda" else ():
        for options, dtype in steps.CASES:
            yield Check(f"step of {shapes} in {dtype}, {options}", partial(optimizer_here, options, dtype, shapes))


def _launches():
    yield from kernels.every_launch([name for name in PRESETS if name != "bf16"])
    for cast, launch in other_launches():
        yield f"{cast} of {tuple(launch.arguments['x'].shape)} in {launch.arguments['x'].dtype}", launch


def _optimizers():
    for shapes in SHAPES:
        for launch in steps.launches(shapes):
            yield f"optimizers, {launch.constants.get('PASS', 'measure')}, {shapes}", launch


def compiled_elsewhere(name, launch):
    """For an H100, without one."""
    code = kernels.resources_of(launch, 90)
    if code.spilled > bounds_of(name, 90)[1]:
        raise Wrong(f"{launch.kernel} spills {code.spilled} bytes: {launch.constants}")
    return {"registers": code.registers}


def compiled_here(name, launch):
    """As a layer compiles it: by a launch."""
    gpu.run(with_memory(launch, "cuda"))
    kernel = getattr(gpu._kernels()[0], launch.kernel)
    codes = [code for cache in kernel.device_caches.values() for code in cache[0].values()]
    arch = gpu._capability(torch.device("cuda"))
    if (spilled := 4 * max(code.n_spills for code in codes)) > bounds_of(name, arch)[1]:
        raise Wrong(f"{launch.kernel} spills {spilled} bytes: {launch.constants}")
    return {"registers": codes[-1].n_regs}


def optimizer_here(options, dtype, shapes):
    """All kernels of a step."""
    parameters = make_parameters(dtype, shapes, "cuda")
    set_gradients(parameters, seed=0)
    with backend("triton"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ClippedAdam(parameters, **options).step()
    if texts := faults_of(str(warning.message) for warning in caught):
        raise Wrong("; ".join(texts))
