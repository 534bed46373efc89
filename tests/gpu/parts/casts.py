"""Times of the kernels of layers, as shares of the rate of copies."""

from functools import partial

from torch import Tensor

from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.nn import PRESETS
from tests.benchmarks import kernels
from tests.gpu import clock
from tests.gpu.memory import with_memory
from tests.gpu.table import Check

SHAPES = ((8192, 4096), (2048, 2048))
SMALL = (64, 64)


def checks(setting):
    presets = ["nvfp4"] if setting.is_small else [name for name in PRESETS if name != "bf16"]
    for shape in (SMALL,) if setting.is_small else SHAPES:
        kernels.SHAPE = shape  # of the launches that follow
        for name, launch in list(kernels.every_launch(presets))[: 3 if setting.is_small else None]:
            size = f"{shape[0]} x {shape[1]}"
            yield Check(f"{launch.kernel}, {size}: {name}", partial(measure, launch, setting.device), judges=False)


def measure(launch, device):
    real = with_memory(launch, device)
    moved = bytes_moved(real)
    took = clock.seconds(partial(gpu.run, real), device, largest=0.2)
    rate = moved / took
    return {
        "us": took * 1e6,
        "GB/s": rate / 1e9,
        "share of copies": rate / clock.copy_rate(device),
        "host, us": clock.host_seconds(partial(gpu.run, real), device) * 1e6,
    }


def bytes_moved(launch):
    """Bytes of matrices and block scales, once each; kernels of rows read the matrix twice."""
    matrix = launch.arguments["x"]
    tensors = [value for value in launch.arguments.values() if isinstance(value, Tensor)]
    once = sum(tensor.nbytes for tensor in tensors if tensor.numel() > matrix.numel() // 64)
    return once + matrix.nbytes * (launch.kernel == "cast_rows")
