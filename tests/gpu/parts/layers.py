"""Times of one linear layer with all presets, beside ``nn.Linear`` in bf16: on the device and on the host."""

import statistics
from functools import partial

import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import PRESETS, AmaxHistories, LayerKeys
from tests.gpu import clock, stacks
from tests.gpu.table import Check

TOKENS = 8192
FEW = ("nvfp4", "mxfp8", "fp8-current", "fp8-row", "fp8-blockwise", "ternary")
EMULATED = ("nvfp4", "fp8-current")  # with emulated GEMMs, too, where native ones may serve


def checks(setting):
    """The most telling size first, and all presets there alone."""
    small = setting.is_small
    presets = ["nvfp4"] if small else [name for name in PRESETS if name != "bf16"]
    variants = [(name, "auto") for name in presets] + [(name, "emulated") for name in EMULATED]
    few = [(name, "auto") for name in FEW]
    sizes = {32: variants[:2]} if small else {4096: variants, 2048: few, 8192: few, 1024: few}
    for size, pairs in sizes.items():
        tokens = 32 if small else TOKENS
        for casts in (None, *pairs):
            name = "nn.Linear" if casts is None else casts[0] + ", emulated" * (casts[1] == "emulated")
            yield Check(f"{size}: {name}", partial(measure, casts, size, tokens, setting.device), judges=False)
    for casts in (None, *stacks.TIMED[: 1 if small else None]):
        for grouped in ("auto", "native") if casts else ("auto",):
            name = "F.grouped_mm" if casts is None else f"{casts}, {'grouped' if grouped == 'native' else 'one by one'}"
            how = partial(stacks.measure_stack, casts, grouped, setting.device, small)
            yield Check(f"{stacks.EXPERTS} experts: {name}", how, judges=False)


class Layer:
    def __init__(self, casts, size, tokens, device):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(size, size, bias=False)).to(device, torch.bfloat16)
        self.x = torch.randn(tokens, size, device=device, dtype=torch.bfloat16).requires_grad_()
        self.g, self.is_plain = torch.randn_like(self.x), casts is None
        if casts is not None:
            convert(self.model, casts[0], backend=casts[1])
            LayerKeys(self.model).fill_(1, device=torch.device(device))
            AmaxHistories(self.model).to_(torch.device(device))

    def forward(self):
        with torch.no_grad():
            return self.model(self.x)

    def clear(self):
        self.x.grad = None
        self.model.zero_grad()

    def both(self):
        self.clear()
        with torch.autograd.set_multithreading_enabled(self.is_plain):  # as the plugin has it
            self.model(self.x).backward(self.g)


def measure(casts, size, tokens, device):
    """The layer and ``nn.Linear`` in turns, so that both see the same clocks: replayed by CUDA graphs, for which no
    host is waited, and enqueued one by one."""
    layer, plain = Layer(casts, size, tokens, device), Layer(None, size, tokens, device)
    layer.both()  # compares kernels with plain code
    peaks = [clock.peak_bytes(one.both, device, one.clear) for one in (layer, plain)]
    eager = _in_turns([layer.both, plain.both], device)
    host, launches = clock.host_seconds(layer.both, device, rounds=3), clock.kernels_launched(layer.both, device)
    replays = [[clock.captured(call, device)[0] for call in (one.forward, one.both)] for one in (layer, plain)]
    forward, both = (_in_turns(pair, device) for pair in zip(*replays, strict=True))
    return {
        "forward, ms": forward[0] * 1e3,
        "both passes, ms": both[0] * 1e3,
        "speed by nn.Linear": both[1] / both[0],
        "share of GEMM rate": 6 * tokens * size**2 / both[0] / clock.gemm_rate(device),
        "one by one, ms": eager[0] * 1e3,
        "its speed by nn.Linear": eager[1] / eager[0],
        "host, ms": host * 1e3,
        "launches": launches,
        "peak by nn.Linear": None if None in peaks else peaks[0] / peaks[1],
    }


def _in_turns(functions, device):
    """The medians of three times of each."""
    times = [[clock.seconds(one, device, calls=4, rounds=1) for one in functions] for _ in range(3)]
    return [statistics.median(column) for column in zip(*times, strict=True)]
