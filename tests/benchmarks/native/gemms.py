"""What native block-scaled GEMMs should take, predicted: nothing here runs on a GPU.

    python -m tests.benchmarks.native.gemms

A linear layer's pass and gradients have three GEMMs and six casts. A GEMM takes the larger of FLOPs over the peak and
bytes over the bandwidth of a data sheet; a cast takes the largest bound of its kernel, as in
:mod:`tests.benchmarks.kernels`; one kernel makes both native operands of the gradient. Latencies, launches and
everything else are left out.
"""

from lightning_lowbit import LinearCasts
from lightning_lowbit.data_sheets import PEAKS
from lightning_lowbit.nn.casts.traits import CONTRACTION, GEMM, OPERANDS
from lightning_lowbit.nn.native.table import NATIVE
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
            if operand == "dgrad_g":
                other = casts.cast_of("wgrad_g")
                assert other is not None
                seconds["native"] += size * kernels.least_seconds(kernels.layouts_of((cast, other), block), card)
            elif operand != "wgrad_g":
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
