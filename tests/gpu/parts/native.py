"""Native GEMMs against emulated ones: to the bit where sums are exact, and within tolerances for random numbers."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_lowbit.nn.native.devices import native_obstacle
from tests.gpu import stacks
from tests.gpu.table import Check, Skipped, Wrong
from tests.nn.native import test_gpu

# Magnitudes of elements with which scales are powers of two: 21 / (448 * 6) is one. 1 for other kinds.
LARGEST = {"int8": 127, "nvfp4": 21}
# Tokens, inputs, outputs: sums of at most 512 products of -1, 0 and 1 have 10 bits, of -127, 0 and 127 24 bits.
SIZES = [(256, 512, 384), (200, 100, 60), (1, 64, 48), (33, 48, 17)]
RANDOM = [(256, 512, 768), (200, 100, 60), (64, 256, 1), (1, 64, 48), (0, 64, 48)]
DTYPES = (torch.bfloat16, torch.float32)


def checks(setting):
    device = torch.device(setting.device)
    kinds = {kind: native_obstacle(device, kind) for kind in test_gpu.CASTS}
    for kind, obstacle in kinds.items():
        if obstacle is not None:
            yield Check(kind, partial(skip, obstacle))
    pairs = [(kind, casts) for kind in kinds for casts in test_gpu.CASTS[kind] if kinds[kind] is None]
    for kind, casts in pairs:
        if kind == "nvfp4" and casts != "nvfp4":  # scales that are never powers of two
            continue
        for size in SIZES[:1] if setting.is_small else SIZES:
            for dtype in DTYPES if setting.device == "cuda" else DTYPES[1:]:  # CPUs round products in bf16 twice
                name = f"{kind}, {_words(casts)}, {size} in {_short(dtype)}"
                yield Check(name, partial(to_the_bit, kind, casts, size, dtype, device))
    for sizes in stacks.SIZES[:1] if setting.is_small else stacks.SIZES:
        for name, casts in stacks.EXACT.items():
            yield Check(f"grouped, {name}, {sizes}", partial(stacks.check_grouped, casts, sizes, True, setting.device))
        for casts in stacks.RANDOM[:1] if setting.is_small else stacks.RANDOM:
            check = partial(stacks.check_grouped, casts, sizes, False, setting.device)
            yield Check(f"grouped, {casts}, {sizes} random", check)
    for number, (kind, casts) in enumerate(pairs if setting.device == "cuda" else []):
        for other, size in enumerate(RANDOM):
            dtype = DTYPES[(number + other) % 2]
            name = f"{kind}, {_words(casts)}, {size} random in {_short(dtype)}"
            yield Check(name, partial(near, kind, casts, size, dtype))


def _words(casts):
    if isinstance(casts, str):
        return casts
    return ", ".join(f"{name} {value}" for name, value in list(casts.items())[:2])


def _short(dtype):
    return str(dtype).removeprefix("torch.")


def skip(obstacle):
    raise Skipped(obstacle)


def exact(casts):
    """The casts with scales that are powers of two, where they are numbers in fp32 and elements are not integers."""
    if isinstance(casts, dict) and "preset" not in casts or casts == "ternary":
        return casts
    changed = {"preset": casts} if isinstance(casts, str) else dict(casts)
    name = changed["preset"]
    if name.startswith("fp8"):
        changed.setdefault("every", {"scale": {"rounding": "power_of_two"}})
    return changed


def to_the_bit(kind, casts, size, dtype, device):
    if kind == "mxfp4" and dtype == torch.float32:
        raise Skipped("MXFP4 GEMMs give bfloat16 alone")
    tokens, inputs, outputs = size
    generator = torch.Generator("cpu").manual_seed(0)

    def small(*shape):
        return (
            torch.randint(-1, 2, shape, generator=generator, device="cpu").mul(LARGEST.get(kind, 1)).to(device, dtype)
        )

    def scaled(matrix):
        """Rows, and blocks of 128 columns, times powers of two, if scales of scales leave room for them."""
        if kind == "nvfp4":
            return matrix
        rows, columns = matrix.shape
        powers = torch.randint(-2, 3, (rows, -(-columns // 128)), generator=generator, device="cpu").to(device, dtype)
        return matrix * powers.exp2().repeat_interleave(128, 1)[:, :columns]

    original = nn.Linear(inputs, outputs, device=device, dtype=dtype)
    with torch.no_grad():
        original.weight.copy_(small(outputs, inputs))
        original.bias.copy_(small(outputs) * (kind != "mxfp4"))  # which rounds to bfloat16 before a bias
    x, g = scaled(small(tokens, inputs)), small(tokens, outputs)
    native, emulated = (test_gpu.results(exact(casts), backend, original, x, g) for backend in ("native", "emulated"))
    for name, expected in emulated.items():
        if not torch.equal(native[name], expected):
            wrong = native[name] != expected
            pair = native[name][wrong][0].item(), expected[wrong][0].item()
            raise Wrong(f"{name} differs in {int(wrong.sum())} of {wrong.numel()}, such as {pair}")


def near(kind, casts, size, dtype):
    try:
        test_gpu.test_native_equals_emulated(kind, casts, size, dtype)
    except pytest.skip.Exception as reason:
        raise Skipped(str(reason)) from reason
    except AssertionError as fault:
        raise Wrong(str(fault)) from fault
