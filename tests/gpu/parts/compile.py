"""Every kernel of layers and optimizers compiles and spills nothing; later parts find them in Triton's cache."""

import torch

from lightning_lowbit.nn import PRESETS
from tests.benchmarks import kernels
from tests.gpu.table import Check, Wrong
from tests.kernels import steps
from tests.kernels.test_triton_aot import other_launches

SOME = 12  # kernels of a rehearsal


def checks(setting):
    arch = int("{}{}".format(*torch.cuda.get_device_capability())) if setting.device == "cuda" else 90
    launches = list(_launches())
    for number, (name, launch) in list(enumerate(launches))[:: len(launches) // SOME if setting.is_small else 1]:
        yield Check(f"{number} {launch.kernel}: {name}", lambda launch=launch: compiled(launch, arch))


def _launches():
    yield from kernels.every_launch([name for name in PRESETS if name != "bf16"])
    for cast, launch in other_launches():
        yield f"{cast} of {tuple(launch.arguments['x'].shape)} in {launch.arguments['x'].dtype}", launch
    for shapes in (steps.ALIGNED, [(33, 130)]):
        for launch in steps.launches(shapes):
            yield f"optimizers, {launch.constants.get('PASS', 'measure')}, {shapes}", launch


def compiled(launch, arch):
    code = kernels.resources_of(launch, arch)
    if code.spilled:
        raise Wrong(f"{launch.kernel} spills {code.spilled} bytes on sm_{arch}: {launch.constants}")
    return {"registers": code.registers, "shared bytes": code.shared}
