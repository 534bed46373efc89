"""Memory of a LoRA fine-tuning step: the base as float32 or bfloat16 matrices, and as codes.

Run: ``python -m tests.benchmarks.adapters``. Each base is measured in a process of its own: bytes of its parameters,
what the process holds before the first step, and its peak in three steps. Adapters, their gradients and moments are the
same. Time is not measured.
"""

import argparse
import ctypes
import gc
import resource
import subprocess
import sys

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_lowbit import pack_frozen
from lightning_lowbit.nn import LayerKeys
from tests.benchmarks.environment import describe

BASES = ("float32", "bfloat16", "nvfp4-nvidia", "int4")
MIB = 2**20


class LoRA(nn.Module):
    """A frozen layer, and two trained matrices of rank 16 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 16, bias=False)
        self.up = nn.Linear(16, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def made(base: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2736, "num_hidden_layers": 12, "num_attention_heads": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **sizes)).requires_grad_(False)
    if base != "float32":
        model.to(torch.bfloat16)  # embeddings and norms, too
    if base in BASES[2:]:
        pack_frozen(model, base, skip=["lm_head"])
    for name, module in [*model.named_modules()]:
        if name.endswith(("q_proj", "v_proj")):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LoRA(module))
    return model


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(base: str) -> None:
    model = made(base)
    of_base = sum(p.numel() * p.itemsize for p in model.parameters() if not p.requires_grad)
    keys = LayerKeys(model) if base in BASES[2:] else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    tokens = torch.randint(0, 1024, (4, 256))
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the peak of making the model
    before = resident()
    for step in range(3):
        if keys is not None:
            keys.fill_(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with open("/proc/self/status") as file:
        top = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    sizes = {"base": of_base, "resident before": before, "peak of three steps": top}
    print(f"{base:14}", *(f"{what} {size / MIB:7.1f} MiB" for what, size in sizes.items()), sep="   ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", choices=BASES)
    chosen = parser.parse_args().base
    if chosen:
        measure(chosen)
    else:
        print(describe())
        print("LLaMA of 151M parameters in its blocks, LoRA of rank 16 on q and v, 4 x 256 tokens, bf16 autocast")
        for base in BASES:
            subprocess.run([sys.executable, "-m", "tests.benchmarks.adapters", "--base", base], check=True)
