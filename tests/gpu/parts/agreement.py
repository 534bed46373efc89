"""What the package compares itself before it uses a kernel, large matrices, and plain code there and on the CPU."""

import warnings
from functools import partial

import torch

from lightning_lowbit import Cast, Scale, compilation
from lightning_lowbit.kernels import operands, packing, products
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.kernels.layout import make_laid_out
from lightning_lowbit.nn import PRESETS
from lightning_lowbit.optim import kernels as optimizers
from lightning_lowbit.quant import Hadamard
from lightning_lowbit.quant.call import CastCall, operand_dtype
from lightning_lowbit.quant.operand import make_operand
from lightning_lowbit.quant.shard import Shard
from tests.benchmarks.kernels import casts_of
from tests.gpu.models import faults_of
from tests.gpu.table import Check, Wrong
from tests.quant.tensors import NVFP4, NVFP4_TILES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STOCHASTIC = NVFP4.replace(rounding="stochastic")
CASTS = {  # one of each kind
    "nvfp4": NVFP4,
    "nvfp4 stochastic": STOCHASTIC,
    "nvfp4 tiles": NVFP4_TILES,
    "mxfp8": Cast("e4m3", Scale("e8m0", 32)),
    "fp8 row": Cast("e4m3", Scale("fp32", "row")),
    "fp8 blockwise": Cast("e4m3", Scale("fp32", 128)),
    "e5m2 stochastic": Cast("e5m2", Scale("fp32", "tensor"), "stochastic"),
}
SMALL, LARGE = (192, 64), (8192, 4096)
HUGE = (2**31 - 2**16) // 4096, 4096  # nearly as many elements as kernels take


def checks(setting):
    """The most telling ones first."""
    device, presets = torch.device(setting.device), [name for name in PRESETS if name != "bf16"]
    if setting.is_small:
        presets = ["fp8-row"]
    yield Check("optimizers", partial(optimizers_agree, device))
    yield Check("results of GEMMs, delayed scaling", partial(others_agree, device))
    yield Check("powers of two", partial(powers_of_two, device))
    shape = SMALL if setting.is_small else HUGE
    yield Check("{} x {}".format(*shape), partial(huge, device, *shape))
    shape = SMALL if setting.is_small else LARGE
    for name, cast in list(CASTS.items())[: 2 if setting.is_small else None]:
        if device.type == "cuda":
            yield Check(f"compiled code of {name}", partial(compiled_is_eager, cast, device))
        yield Check("{} x {} in ".format(*shape) + name, partial(large, cast, device, *shape))
    for name in presets:
        yield Check(f"plain code of {name}", partial(plain_is_that_of_cpus, name, device))
    for dtype in DTYPES[:1] if setting.is_small else DTYPES:
        for name in presets:
            short = str(dtype).removeprefix("torch.")
            yield Check(f"{name} in {short}", partial(preset_agrees, name, dtype, device))


def optimizers_agree(device):
    if not accepted(partial(optimizers.triton_agrees, device)):
        raise Wrong("the kernels of optimizers do not agree with plain torch")


def accepted(agree):
    """Whether a comparison of the package agrees, without a warning."""
    with warnings.catch_warnings(record=True) as caught, compilation.backend("triton"):
        warnings.simplefilter("always")
        agrees = agree()
    if texts := faults_of(map(str, (warning.message for warning in caught))):
        raise Wrong("; ".join(texts))
    return agrees


def _serves(operation, *arguments):
    form = operation.form(*arguments)
    return form is not None and operation.is_served(form, arguments[0].device)


def preset_agrees(name, dtype, device):
    """All operations of the casts of a preset that the kernels have."""
    x, key = torch.ones(64, 160, dtype=dtype, device=device), torch.tensor(1, device=device)
    signs, served = Hadamard(16).diagonal(None, device), 0
    for cast, dim in casts_of([name]):
        call = CastCall(cast, dim, key)
        laid_out = call._replace(block={"e4m3": 16, "e8m0": 32}.get(cast.scale.format, 0))
        wanted = {"operand": accepted(lambda call=call: _serves(operands.CAST, x, call))}
        if gpu.packs(cast, x, dim):
            wanted["packed"] = accepted(lambda call=call: _serves(packing.PACK, x, call))
        if laid_out.block and cast.scale.per_block and gpu.lays_out(cast, x, laid_out.block, dim):
            wanted["laid out"] = accepted(lambda call=laid_out: _serves(packing.LAY_OUT, x, call))
        if gpu.rotation_obstacle(cast, dim) is None:
            wanted["rotated"] = accepted(lambda call=call: _serves(operands.CAST, x, call._replace(rotation=signs)))
        if dim == 1 and gpu.covers_both(cast, cast) is None:
            pair = call, call._replace(dim=0)
            wanted["both"] = accepted(lambda pair=pair: _serves(operands.CAST_BOTH, x, *pair))
        if refused := [what for what, answer in wanted.items() if not answer]:
            raise Wrong(f"{cast}, dim {dim}: no kernel serves {refused}")
        served += len(wanted)
    return {"comparisons": served}


def others_agree(device):
    x, one = torch.ones(64, 160, device=device), torch.ones((), device=device)
    asked = {
        "results of GEMMs": (products.SCALE_AND_ROUND, (x, [one], None, torch.bfloat16)),
        "delayed scaling": (products.DELAY, (one,)),
        "amaxes": (operands.AMAX, (x, None, 1)),
        "rotations": (operands.ROTATE, (x, Hadamard(16).diagonal(None, device), 1)),
        "copies for GEMMs": (products.PAD, (torch.ones(40, 64, dtype=torch.int8, device=device).t(), 0, 8)),
        "signs": (operands.SIGNS, (torch.ones(3, dtype=torch.int64, device=device), 16)),
    }
    refused = [name for name, (row, arguments) in asked.items() if not accepted(lambda: _serves(row, *arguments))]  # noqa: B023
    if refused:
        raise Wrong(f"no kernel serves {refused}")


def powers_of_two(device):
    """``ldexp`` of the device, of which plain code makes scales."""
    exponents = torch.arange(-149, 128, device=device)
    made = torch.ldexp(torch.ones(len(exponents), device=device), exponents)
    wanted = torch.tensor([2.0**k for k in range(-149, 128)], dtype=torch.float64).float()
    if wrong := exponents.cpu()[made.cpu() != wanted].tolist():
        raise Wrong(f"ldexp is not exact on {device}: 2^{wrong[:8]}")


def _sample(rows, columns, device, dtype=torch.bfloat16):
    """The same matrix on all devices, with rows of very different sizes."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(rows, columns, generator=generator, device="cpu")
    return (x * torch.randn(rows, 1, generator=generator, device="cpu").mul(3).exp()).to(device, dtype)


def _hold(results, expected, what):
    for name, result, wanted in zip(("values", "factor"), results, expected, strict=False):
        if result is None or wanted is None:
            continue
        result, wanted = result.float(), wanted.to(result.device).float()
        unequal = (result != wanted) & ~(result.isnan() & wanted.isnan())
        if unequal.any():
            pair = result[unequal].flatten()[0].item(), wanted[unequal].flatten()[0].item()
            raise Wrong(f"{what}: {name} differ in {int(unequal.sum())} of {result.numel()}, such as {pair}")


def _call(cast, dim, device, x, **others):
    return CastCall(cast, dim, torch.tensor(12345, device=device), None, operand_dtype(x.dtype, cast), **others)


def plain_is_that_of_cpus(name, device):
    x = _sample(96, 272, "cpu")
    for cast, dim in casts_of([name]):
        with compilation.backend("eager"):
            there = make_operand(x.to(device), _call(cast, dim, device, x))
            _hold(there, make_operand(x, _call(cast, dim, "cpu", x)), f"{cast}, dim {dim}")


def compiled_is_eager(cast, device):
    x, results = _sample(512, 512, device), {}
    for code in ("compiled", "eager"):
        with compilation.backend(code):
            results[code] = make_operand(x, _call(cast, 1, device, x))
    _hold(*results.values(), f"{cast}, compiled")


def large(cast, device, rows, columns):
    """On the device alone, where plain code makes large matrices in no time."""
    x = _sample(rows, columns, device)
    for dim in (0, 1):
        call = _call(cast, dim, device, x)
        with compilation.backend("eager"):
            expected = make_operand(x, call)
            block = {"e4m3": 16, "e8m0": 32}.get(cast.scale.format, 0)
            has_layout = block and gpu.lays_out(cast, x, block, dim)
            laid_out = make_laid_out(x, call._replace(dtype=None, block=block)) if has_layout else ()
        _hold(gpu.make_operand(x, call), expected, f"{cast}, dim {dim}")
        if has_layout:
            layouts = gpu.lay_out(x, call._replace(dtype=None, block=block)), laid_out
            _hold(
                *([part.view(torch.uint8) for part in layout[:2]] for layout in layouts), f"layout of {cast}, dim {dim}"
            )


def huge(device, rows, columns):
    """The first and last rows, which the plain code makes alone: as a shard, with the random bits of their place."""
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
    for first in (0, rows - 64):
        x[first : first + 64] = _sample(64, columns, device)
    for cast in (NVFP4, STOCHASTIC, Cast("e4m3", Scale("fp32", "row"))):
        amax = x[:64].abs().amax().float() if cast.scale.needs_amax else None
        values = gpu.make_operand(x, _call(cast, 1, device, x)._replace(amax=amax)).values
        for first in (0, rows - 64):
            place = Shard("", 0, first, 64, rows)
            part = x[first : first + 64].clone()
            with compilation.backend("eager"):
                expected = make_operand(part, _call(cast, 1, device, x)._replace(amax=amax, shard=place))
            _hold((values[first : first + 64],), expected[:1], f"{cast}: rows from {first}")
