"""Every kernel of layers and optimizers compiles and spills nothing; later parts find them in Triton's cache."""

from functools import partial

from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.nn import PRESETS
from tests.benchmarks import kernels
from tests.gpu.table import Check, Wrong
from tests.kernels import steps
from tests.kernels.test_triton_aot import other_launches

SOME = 12  # kernels of a rehearsal


def checks(setting):
    launches, resources = list(_launches()), here if setting.device == "cuda" else elsewhere
    for number, (name, launch) in list(enumerate(launches))[:: len(launches) // SOME if setting.is_small else 1]:
        yield Check(f"{number} {launch.kernel}: {name}", partial(compiled, launch, resources))


def _launches():
    yield from kernels.every_launch([name for name in PRESETS if name != "bf16"])
    for cast, launch in other_launches():
        yield f"{cast} of {tuple(launch.arguments['x'].shape)} in {launch.arguments['x'].dtype}", launch
    for shapes in (steps.ALIGNED, [(33, 130)]):
        for launch in steps.launches(shapes):
            yield f"optimizers, {launch.constants.get('PASS', 'measure')}, {shapes}", launch


def compiled(launch, resources):
    registers, spilled = resources(launch)
    if spilled:
        raise Wrong(f"{launch.kernel} spills {spilled} bytes: {launch.constants}")
    return {"registers": registers}


def here(launch):
    """Registers and spilled bytes of the kernel as this GPU gets it."""
    kernel = getattr(gpu._kernels()[0], launch.kernel)
    code = kernel.warmup(
        **launch.arguments, **gpu.compiled_for(launch), **gpu.options_of(launch), grid=(launch.programs,)
    )
    code._init_handles()  # loads it
    return code.n_regs, 4 * code.n_spills


def elsewhere(launch):
    """The same for an H100, without one."""
    code = kernels.resources_of(launch, 90)
    return code.registers, code.spilled
