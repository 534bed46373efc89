"""CUDA graphs of a layer's passes, what waits for the GPU, and what a shorter last batch compiles."""

import warnings
from collections import Counter
from functools import partial

import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.kernels.gpu import casts as gpu
from lightning_lowbit.nn import AmaxHistories, LayerKeys
from lightning_lowbit.optim import LowBitAdamW
from tests.gpu import clock
from tests.gpu.table import Check, Skipped, Wrong

PRESETS = ("nvfp4", "fp8-current", "fp8-row", "mxfp8", "ternary")
WIDTH, TOKENS = 512, 1024


def checks(setting):
    for name in PRESETS:
        yield Check(f"graph of {name}", partial(graph, name, setting))
    for name in PRESETS:
        yield Check(f"waits of {name}", partial(waits, name, setting), judges=False)
    for name in PRESETS:
        yield Check(f"last batch of {name}", partial(last_batch, name, setting), judges=False)


def _model(name, setting):
    torch.manual_seed(0)
    width = 32 if setting.is_small else WIDTH
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    model.to(setting.device, torch.bfloat16)
    convert(model, name)
    LayerKeys(model).fill_(1, device=torch.device(setting.device))
    AmaxHistories(model).to_(torch.device(setting.device))
    return model


def _input(setting, tokens=TOKENS):
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(tokens, 32 if setting.is_small else WIDTH, generator=generator, device="cpu")
    return x.to(setting.device, torch.bfloat16).requires_grad_()


def _passes(model, x):
    model[0].lowbit.calls.begin()  # or each call would have other random bits
    model.zero_grad(set_to_none=False)
    if x.grad is not None:
        x.grad.zero_()
    y = model(x)
    y.square().sum().backward()
    return y


def graph(name, setting):
    """After three steps, both passes are captured; a replay on another input gives what the passes give."""
    if setting.device != "cuda":
        raise Skipped("needs CUDA")
    model, x, other = _model(name, setting), _input(setting), _input(setting)
    with torch.no_grad():
        other.mul_(-0.5)
    replay, y = clock.captured(partial(_passes, model, x), setting.device)
    with torch.no_grad():
        x.copy_(other)
    replay()
    torch.cuda.synchronize()
    results = [y, x.grad, *(parameter.grad for parameter in model.parameters())]
    replayed = [tensor.detach().clone() for tensor in results]
    direct = _passes(model, x)
    expected = [direct, x.grad, *(parameter.grad for parameter in model.parameters())]
    names = ["output", "gradient of x", *(name for name, _ in model.named_parameters())]
    if wrong := [name for name, *pair in zip(names, replayed, expected, strict=True) if not torch.equal(*pair)]:
        raise Wrong(f"a replay has other values of {wrong}")


def waits(name, setting):
    """Places that wait for the GPU in the third step."""
    if setting.device != "cuda":
        raise Skipped("needs CUDA")
    model, x = _model(name, setting), _input(setting)
    optimizer = LowBitAdamW(model.parameters())
    for _ in range(2):
        _passes(model, x)
        optimizer.step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _passes(model, x)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    places = Counter(f"{warning.filename.rpartition('/')[2]}:{warning.lineno}" for warning in waits)
    return {"waits": places.total(), "places": dict(places)}


def last_batch(name, setting):
    """Kernels that are compiled for a batch of 1000 and one of 7 tokens after those of 1024."""
    model, counts = _model(name, setting), {}
    for tokens in (64, 24, 7) if setting.is_small else (TOKENS, 1000, 7):
        before = compiled_kernels()
        _passes(model, _input(setting, tokens))
        counts[f"kernels of {tokens} tokens"] = compiled_kernels() - before
    return counts


def compiled_kernels():
    """How many kernels of the package Triton holds in this process."""
    held = [getattr(kernel, "device_caches", {}) for kernel in vars(gpu._kernels()[0]).values()]
    return sum(len(cache[0]) for caches in held for cache in caches.values())
