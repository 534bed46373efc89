"""What native block-scaled GEMMs should take, predicted from bytes and FLOPs: nothing here runs on a GPU.

    python -m tests.benchmarks.native.gemms

A linear layer's pass and gradients have three GEMMs and six casts. A GEMM takes the larger of FLOPs over the peak and
bytes over the bandwidth of a data sheet; a cast takes its bytes over the bandwidth. Latencies, launches and everything
else are left out. Three ways:

    emulated            casts as the kernels make them (values in bfloat16, float32 for blocks of 128), GEMMs of these
    native, one kernel  each cast reads its operand once and writes codes and scales as the GEMM takes them; there is no
                        such kernel yet: the least that is possible
    native, as it is    the bytes that the code of today reads and writes, counted on a CPU: what Inductor compiles is
                        counted as one kernel, which reads its arguments once
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit import Cast, LinearCasts
from lightning_lowbit.compilation import backend
from lightning_lowbit.metrics.devices import PEAKS
from lightning_lowbit.nn.native import layout, operand
from lightning_lowbit.nn.native.gemms import _prepared, demands
from lightning_lowbit.nn.native.operand import block_operand
from lightning_lowbit.nn.plan import CONTRACTION, GEMM, OPERANDS
from lightning_lowbit.quant import scaling

TOKENS, INPUTS, OUTPUTS = 8192, 4096, 4096
SIZES = {"x": TOKENS * INPUTS, "w": OUTPUTS * INPUTS, "g": TOKENS * OUTPUTS}
BANDWIDTH = {"H100": 3.35e12, "B200": 8e12}
# By kind: the device, and the arithmetic of its native and its emulated GEMM. Float32 products run in TF32 at most.
KINDS = {
    "nvfp4": ("B200", "float4", "bfloat16"),
    "mxfp8": ("B200", "float8", "bfloat16"),
    "fp8-blockwise": ("H100", "float8", "float32"),
}
FLOAT32 = {"H100": 67e12, "B200": 80e12}


class Bytes(TorchDispatchMode):
    """Counts the bytes that operations read and write; views cost nothing, and compiled functions are one operation."""

    COMPILED = ((scaling, "block_scales"), (operand, "round_codes"), (layout, "join_pairs"))

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __enter__(self) -> Any:
        self.patches = [patch.object(module, name, self._one(getattr(module, name))) for module, name in self.COMPILED]
        for each in self.patches:
            each.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        for each in self.patches:
            each.stop()
        return super().__exit__(*error)

    def _one(self, function: Any) -> Any:
        def call(*tensors: Any, **static: Any) -> Tensor:
            before = self.count
            out: Tensor = function(*tensors, **static)
            there = [one for one in (*tensors, out) if isinstance(one, Tensor)]
            self.count = before + sum(one.numel() * one.itemsize for one in there)
            return out

        return call

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        given = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in torch.utils._pytree.tree_leaves(out) if isinstance(one, Tensor)]
        storages = {one.untyped_storage().data_ptr() for one in given}
        if any(one.untyped_storage().data_ptr() not in storages for one in made):
            self.count += sum(one.numel() * one.itemsize for one in (*given, *made))
        return out


def bytes_as_it_is(cast: Cast, kind: str, dim: int) -> float:
    """Bytes per element of an operand's way to the GEMM, packed and swizzled."""
    x, key = torch.randn(1024, 1024).bfloat16(), torch.tensor(1)
    with Bytes() as counted, backend("eager"):
        made = block_operand(x, cast, kind, dim, key)
        if kind != "fp8-blockwise":  # whose codes lie as they are made, and whose scales are few
            _prepared(made, 16, demands(kind).inner, amd=False)
    return counted.count / x.numel()


def least_bytes(cast: Cast) -> float:
    return 2 + (2 if cast.scale.needs_amax else 0) + cast.bits / 8


def emulated_bytes(cast: Cast) -> float:
    return 2 + (2 if cast.scale.needs_amax else 0) + (2 if cast.fits_bfloat16 else 4)


def gemms(device: str, arithmetic: str, bytes_per_element: float) -> float:
    """Seconds of the three GEMMs, each from two operands to a result in bfloat16."""
    peak = FLOAT32[device] if arithmetic == "float32" else PEAKS[device][arithmetic]
    flops, total = 2 * TOKENS * INPUTS * OUTPUTS, sum(SIZES.values())
    memory = [(total - SIZES[of]) * bytes_per_element + SIZES[of] * 2 for of in ("g", "x", "w")]  # of y, dx and dw
    return sum(max(flops / peak, each / BANDWIDTH[device]) for each in memory)


def main() -> None:
    print("| casts | on | bf16 | emulated | native, one kernel per cast | native, as it is | of that, casts |")
    print("|---|---|---|---|---|---|---|")
    for name, (device, native, emulated) in KINDS.items():
        casts, bandwidth = LinearCasts.preset(name), BANDWIDTH[device]
        seconds = {"bf16": gemms(device, "bfloat16", 2), "emulated": 0.0, "least": 0.0, "as it is": 0.0}
        for name_of in OPERANDS:
            cast, size = casts.cast_of(name_of), SIZES[name_of[-1]] / bandwidth
            assert cast is not None
            seconds["emulated"] += size * emulated_bytes(cast)
            seconds["least"] += size * least_bytes(cast)
            kind = casts.native_gemms[GEMM[name_of]]
            seconds["as it is"] += size * bytes_as_it_is(cast, kind, CONTRACTION[name_of])
        in_casts = seconds["as it is"]
        cast = casts.cast_of("fprop_x")
        assert cast is not None
        seconds["emulated"] += gemms(device, emulated, 2 if cast.fits_bfloat16 else 4)
        for way in ("least", "as it is"):
            seconds[way] += gemms(device, native, cast.bits / 8)
        columns = [f"{1e3 * each:.2f}" for each in (*seconds.values(), in_casts)]
        print(f"| `{name}` | {device} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
