"""What native block-scaled GEMMs should take, predicted: nothing here runs on a GPU.

    python -m tests.benchmarks.native.gemms

A linear layer's pass and gradients have three GEMMs and six casts. A GEMM takes the larger of FLOPs over the peak and
bytes over the bandwidth of a data sheet; a cast takes the largest bound of its kernel, as in
:mod:`tests.benchmarks.kernels`; for blocks of 128, whose native operands plain code makes, the bytes that this reads
and writes over the bandwidth. Latencies, launches and everything else are left out.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbit import Cast, LinearCasts
from lightning_lowbit.compilation import backend
from lightning_lowbit.kernels import layout
from lightning_lowbit.metrics.devices import PEAKS
from lightning_lowbit.nn.casts.traits import CONTRACTION, GEMM, OPERANDS
from lightning_lowbit.nn.native.operand import block_operand
from lightning_lowbit.nn.native.table import NATIVE
from lightning_lowbit.quant import scaling
from tests.benchmarks import kernels

TOKENS, INPUTS, OUTPUTS = 8192, 4096, 4096
SIZES = {"x": TOKENS * INPUTS, "w": OUTPUTS * INPUTS, "g": TOKENS * OUTPUTS}
# By kind: the device, and the arithmetic of its native and its emulated GEMM. Float32 products run in TF32 at most.
KINDS = {
    "nvfp4": ("B200", "float4", "bfloat16"),
    "mxfp8": ("B200", "float8", "bfloat16"),
    "fp8-blockwise": ("H100", "float8", "float32"),
}
FLOAT32 = {"H100": 67e12, "B200": 80e12}


class Bytes(TorchDispatchMode):
    """Counts the bytes that operations read and write; views cost nothing, and compiled functions are one operation."""

    COMPILED = ((scaling, "block_scales"), (layout, "_round_codes"), (layout, "_join_pairs"))

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


def bytes_of_plain_code(cast: Cast, kind: str, dim: int) -> float:
    """Bytes per element of an operand's way to a native GEMM that has no kernel."""
    x, key = torch.randn(1024, 1024).bfloat16(), torch.tensor(1)
    with Bytes() as counted, backend("eager"):
        block_operand(x, cast, kind, dim, key)
    return counted.count / x.numel()


def gemms(device: str, arithmetic: str, bytes_per_element: float) -> float:
    """Seconds of the three GEMMs, each from two operands to a result in bfloat16."""
    peak = FLOAT32[device] if arithmetic == "float32" else PEAKS[device][arithmetic]
    flops, total = 2 * TOKENS * INPUTS * OUTPUTS, sum(SIZES.values())
    memory = [(total - SIZES[of]) * bytes_per_element + SIZES[of] * 2 for of in ("g", "x", "w")]  # of y, dx and dw
    return sum(max(flops / peak, each / card_of(device).bandwidth) for each in memory)


def card_of(device: str) -> kernels.Gpu:
    return next(card for card in kernels.GPUS if card.name.startswith(device))


def main() -> None:
    print("| casts | on | bf16 | emulated | of that, casts | native | of that, casts | and their least bytes |")
    print("|---|---|---|---|---|---|---|---|")
    for preset, (device, native, emulated) in KINDS.items():
        casts, card = LinearCasts.preset(preset), card_of(device)
        seconds = dict.fromkeys(("emulated", "native", "least"), 0.0)
        measured = set()
        for operand in OPERANDS:
            cast, tensor, dim = casts.cast_of(operand), operand[-1], CONTRACTION[operand]
            assert cast is not None
            kind, size = casts.native_gemms[GEMM[operand]], SIZES[tensor]
            block = NATIVE[kind].block
            assert block is not None
            seconds["emulated"] += size * kernels.least_seconds(kernels.launch_of(cast, dim), card)
            if kind == "fp8-blockwise":
                seconds["native"] += size * bytes_of_plain_code(cast, kind, dim) / card.bandwidth
            else:
                seconds["native"] += size * kernels.least_seconds(kernels.layout_of(cast, block, dim), card)
            seconds["least"] += size * (2 + cast.bits / 8) / card.bandwidth
            if cast.scale.needs_amax and tensor not in measured:
                measured.add(tensor)
                for way in seconds:
                    seconds[way] += size * 2 / card.bandwidth
        cast = casts.cast_of("fprop_x")
        assert cast is not None
        of_emulated = gemms(device, emulated, 2 if cast.fits_bfloat16 else 4)
        columns = [gemms(device, "bfloat16", 2), seconds["emulated"] + of_emulated, seconds["emulated"]]
        columns += [seconds["native"] + gemms(device, native, cast.bits / 8), seconds["native"], seconds["least"]]
        print(f"| `{preset}` | {device} | {' | '.join(f'{1e3 * each:.2f}' for each in columns)} |")


if __name__ == "__main__":
    main()
