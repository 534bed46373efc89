"""Times of one linear layer with all presets, beside ``nn.Linear`` in bf16: on the device and on the host."""

from functools import partial

import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import PRESETS, AmaxHistories, LayerKeys
from tests.gpu import clock
from tests.gpu.table import Check

SIZES, TOKENS = (1024, 2048, 4096, 8192), 8192
EMULATED = ("nvfp4", "fp8-current")  # with emulated GEMMs, too, where native ones may serve


def checks(setting):
    presets = ["nvfp4"] if setting.is_small else [name for name in PRESETS if name != "bf16"]
    variants = [(name, "auto") for name in presets] + [(name, "emulated") for name in EMULATED]
    sizes = (32,) if setting.is_small else SIZES
    for size in sorted(sizes, key=lambda size: abs(size - 4096)):  # the most telling one first
        tokens = 32 if setting.is_small else TOKENS
        yield Check(f"{size}: nn.Linear", partial(measure, None, size, tokens, setting.device), judges=False)
        for name, backend in variants[: 2 if setting.is_small else None]:
            what = name if backend == "auto" else f"{name}, emulated"
            arguments = (name, backend), size, tokens, setting.device
            yield Check(f"{size}: {what}", partial(measure, *arguments), judges=False)


class Layer:
    def __init__(self, casts, size, tokens, device):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(size, size, bias=False)).to(device, torch.bfloat16)
        self.x = torch.randn(tokens, size, device=device, dtype=torch.bfloat16).requires_grad_()
        self.g = torch.randn_like(self.x)
        if casts is not None:
            convert(self.model, casts[0], backend=casts[1])
            LayerKeys(self.model).fill_(1, device=torch.device(device))
            AmaxHistories(self.model).to_(torch.device(device))

    def forward(self):
        with torch.no_grad():
            return self.model(self.x)

    def both(self):
        self.x.grad = None
        self.model.zero_grad()
        self.model(self.x).backward(self.g)


def measure(casts, size, tokens, device):
    """The layer and ``nn.Linear`` in turns, so that both see the same clocks."""
    layer, plain = Layer(casts, size, tokens, device), Layer(None, size, tokens, device)
    layer.both()  # compares kernels with plain code
    times = {}
    for what in ("forward", "both"):
        pairs = [
            [clock.seconds(getattr(one, what), device, calls=5, rounds=3, largest=0.4) for one in (layer, plain)]
            for _ in range(3)
        ]
        times[what] = [sorted(column)[1] for column in zip(*pairs, strict=True)]
    operations = 6 * tokens * size**2
    values = {
        "forward, ms": times["forward"][0] * 1e3,
        "both passes, ms": times["both"][0] * 1e3,
        "speed of both by nn.Linear": times["both"][1] / times["both"][0],
        "share of GEMM rate": operations / times["both"][0] / clock.gemm_rate(device),
        "host, ms": clock.host_seconds(layer.both, device, calls=5, rounds=3) * 1e3,
        "launches": clock.kernels_launched(layer.both, device),
    }
    peaks = [clock.peak_bytes(one.both, device) for one in (layer, plain)]
    values["peak by nn.Linear"] = peaks[0] / peaks[1] if None not in peaks else None
    return values
