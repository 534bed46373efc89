"""A stack of experts on a device: by grouped GEMMs, and one expert after the other."""

import torch
import torch.nn.functional as F

from lightning_lowbit import convert
from lightning_lowbit.nn import GroupedLinear, LayerKeys
from lightning_lowbit.nn.native.grouped import grouped_obstacle, has_grouped_gemm
from tests.gpu import clock
from tests.gpu.table import Skipped, Wrong

# Casts with scales that are powers of two: sums of at most 256 products of -1, 0 and 1 are numbers of bfloat16.
POWERS = {"every": {"scale": {"rounding": "power_of_two"}}}
EXACT = {"mxfp8": "mxfp8", "mxfp4": "mxfp4", "fp8-row": {"preset": "fp8-row", **POWERS}, "int8": "int8"}
RANDOM = ("nvfp4", "nvfp4-nvidia", "mxfp8", "fp8-row", "fp8-current", "int8")
# Inputs, outputs, and the rows of experts: none, one, and other numbers that are no multiples of 16.
SIZES = [(128, 96, (40, 0, 1, 7, 16, 100)), (72, 20, (5, 0, 35, 1))]
TIMED = ("nvfp4", "mxfp8", "fp8-row", "int8")
EXPERTS, INPUTS, OUTPUTS, ROWS = 64, 2048, 1024, 128  # of each expert


def check_grouped(casts, sizes, is_exact, device):
    """Compares results of both ways: equal to the bit, or within two roundings."""
    if (obstacle := grouped_obstacle(torch.device(device))) is not None:
        raise Skipped(obstacle)
    if not has_grouped_gemm(torch.device(device)):
        raise Wrong("its trial failed: grouped='native' takes the loop here")
    inputs, outputs, rows = sizes
    generator = torch.Generator("cpu").manual_seed(0)

    def numbers(*shape):
        if is_exact:
            return torch.randint(-1, 2, shape, generator=generator, device="cpu").to(device, torch.bfloat16)
        return torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16)

    data = numbers(len(rows), outputs, inputs), numbers(sum(rows), inputs), numbers(sum(rows), outputs)
    expected, results = (Stack(casts, grouped, rows, *data).results() for grouped in ("auto", "native"))
    for name, tensor in expected.items():
        error = (results[name].double() - tensor.double()).norm() / tensor.double().norm()
        if not error <= (0 if is_exact else 2**-8):
            raise Wrong(f"{name} is off by {float(error):.3g} of its norm")


class Stack:
    """A stack with data; its GEMMs are emulated where they come one after the other."""

    def __init__(self, casts, grouped, rows, weight, x, g):
        experts, outputs, inputs = weight.shape
        self.layer = GroupedLinear(experts, inputs, outputs, bias=False, device=weight.device, dtype=torch.bfloat16)
        with torch.no_grad():
            self.layer.weight.copy_(weight)
        if casts is not None:
            convert(self.layer, casts, backend="auto" if grouped == "native" else "emulated", grouped=grouped)
            LayerKeys(self.layer).fill_(1, device=weight.device)
        self.ends = torch.tensor(rows).cumsum(0).tolist()
        self.offsets = torch.tensor(self.ends, dtype=torch.int32, device=weight.device)
        self.x, self.g, self.is_plain = x.clone().requires_grad_(), g, casts is None

    def both(self):
        self.x.grad = self.layer.weight.grad = None
        with torch.autograd.set_multithreading_enabled(self.is_plain):  # as the plugin has it
            self.forward().backward(self.g)

    def forward(self):
        if self.is_plain:
            return F.grouped_mm(self.x, self.layer.weight.mT, offs=self.offsets)
        return self.layer(self.x, self.ends)

    def results(self):
        y = self.forward()
        y.backward(self.g)
        return {"output": y.detach(), "gradient of x": self.x.grad, "gradient of w": self.layer.weight.grad}


def measure_stack(casts, grouped, device, is_small):
    """Times of both passes, enqueued one by one. Without casts: torch's grouped GEMM in bf16."""
    experts, inputs, outputs, rows = (4, 32, 32, 8) if is_small else (EXPERTS, INPUTS, OUTPUTS, ROWS)
    torch.manual_seed(0)
    shapes = (experts, outputs, inputs), (experts * rows, inputs), (experts * rows, outputs)
    stack = Stack(casts, grouped, [rows] * experts, *(torch.randn(s, device=device).bfloat16() for s in shapes))
    stack.both()  # compares kernels with plain code
    calls = 4 if grouped == "native" or casts is None else 1
    took = clock.seconds(stack.both, device, calls=calls, rounds=3)
    return {
        "both passes, ms": took * 1e3,
        "share of GEMM rate": 6 * experts * rows * inputs * outputs / took / clock.gemm_rate(device),
        "host, ms": clock.host_seconds(stack.both, device, calls=calls, rounds=3) * 1e3,
        "launches": clock.kernels_launched(stack.both, device),
    }
