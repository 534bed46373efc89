"""Times of optimizer steps, and of whole training steps."""

from functools import partial

import torch

from lightning_lowbit import convert
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, Muon, StableSPAM
from tests.gpu import clock
from tests.gpu.models import VOCABULARY, llama
from tests.gpu.table import Check

OPTIMIZERS = {
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "LowBitAdamW": partial(LowBitAdamW, moments="fp32"),
    "LowBitAdamW, moments in FP8": LowBitAdamW,
    "StableSPAM": StableSPAM,
    "StableSPAM, moments in FP8": partial(StableSPAM, moments="fp8"),
    "SPAM": SPAM,
    "Muon": Muon,
    "Muon, moments in FP8": partial(Muon, moments="fp8"),
    "Adaptive(AdamW, fused)": lambda parameters: Adaptive(torch.optim.AdamW(parameters, fused=True)),
}
PRESETS = ("nvfp4", "mxfp8", "fp8-current", "fp8-delayed", "fp8-blockwise")
# Width, layers, sequences and tokens of whole training steps.
MODELS = {"8 layers of 512": (512, 8, 16, 512), "2 layers of 2048": (2048, 2, 8, 1024)}
SMALL = {"2 layers of 32": (32, 2, 2, 16)}


def checks(setting):
    small = setting.is_small
    for name, make in OPTIMIZERS.items():
        yield Check(f"optimizer: {name}", partial(optimizer_step, make, setting), judges=False)
    for what, sizes in (SMALL if small else MODELS).items():
        for name in (None, *PRESETS[: 1 if small else None]):
            yield Check(f"{what}: {name or 'bf16'}", partial(training_step, name, sizes, setting), judges=False)
    what, sizes = list((SMALL if small else MODELS).items())[-1]
    for name in (None, *PRESETS[: 1 if small else None]):
        step = partial(training_step, name, sizes, setting, way="graph")
        yield Check(f"{what}, in a CUDA graph: {name or 'bf16'}", step, judges=False)


def _shapes(setting):
    """LLaMA of 60 million parameters, or two small layers of one."""
    width, inner, layers, words = (32, 86, 2, 64) if setting.is_small else (512, 1376, 8, 32000)
    layer = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner), (width,), (width,)]
    return {
        "embed": (words, width),
        **{f"layers.{i}.{k}": shape for i in range(layers) for k, shape in enumerate(layer)},
        "norm": (width,),
        "lm_head": (words, width),
    }


def optimizer_step(make, setting):
    device = setting.device
    named = {name: torch.nn.Parameter(torch.randn(shape, device=device)) for name, shape in _shapes(setting).items()}
    parameters = [*named.values()]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(named.items())
    optimizer.step()  # compares kernels with plain torch
    state = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    took = clock.seconds(optimizer.step, device, calls=3, rounds=5)
    weights = sum(parameter.nbytes for parameter in parameters)
    # It reads weights, gradients and state, and writes weights and state.
    moved = 3 * weights + 2 * sum(value.nbytes for value in state)
    return {
        "ms": took * 1e3,
        "share of copies": moved / took / clock.copy_rate(device),
        "host, ms": clock.host_seconds(optimizer.step, device, calls=3, rounds=3) * 1e3,
        "launches": clock.kernels_launched(optimizer.step, device),
        "state bytes per weight": sum(value.nbytes for value in state) / sum(p.numel() for p in parameters),
        "peak bytes": clock.peak_bytes(optimizer.step, device),
    }


def training_step(casts, sizes, setting, way=""):
    """A step enqueued operation by operation, in one CUDA graph ("graph"), or "compiled" to several. Backward passes
    of casts stay in this thread, as those of the plugin do."""
    width, layers, batch, tokens = sizes
    device = setting.device
    model = llama(width, layers, tokens, device)
    if casts is not None:
        convert(model, casts)
        keys, histories = LayerKeys(model), AmaxHistories(model)
        histories.to_(torch.device(device))
        keys.fill_(1, device=torch.device(device))
    if way == "compiled":
        model.compile(mode="reduce-overhead")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=way == "graph" and device == "cuda")
    words = torch.randint(VOCABULARY, (batch, tokens), device=device)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16), torch.autograd.set_multithreading_enabled(casts is None):
            model(input_ids=words, labels=words).loss.backward()
        if casts is not None:
            histories.advance_()
        optimizer.step()

    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) - model.get_input_embeddings().weight.numel()
    operations = 6 * matrices * batch * tokens
    with clock.turn(alone=False):
        for _ in range(3):  # compiled graphs are warmed up, and captured
            step()
        clock.synchronize(device)
    with clock.turn(alone=True):
        host = clock.host_seconds(step, device, calls=2, rounds=3)
        peak, launches = clock.peak_bytes(step, device), clock.kernels_launched(step, device)
        if way == "graph":
            step, _ = clock.captured(step, device)
        took = clock.seconds(step, device, calls=2, rounds=4)
        rate = clock.gemm_rate(device)
    return {
        "ms": took * 1e3,
        "tokens/s": batch * tokens / took,
        "share of GEMM rate": operations / took / rate,
        "host, ms": host * 1e3,
        "launches": launches,
        "peak bytes": peak,
    }
