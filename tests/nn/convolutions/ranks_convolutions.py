"""One of two processes that train a block of convolutions, each on its images."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn import LayerKeys
from lightning_lowbit.nn.layers.convolution import QuantizedConvolution
from lightning_lowbit.nn.sharded.gather import WeightGathers
from tests.distributed.spreads import full
from tests.launch import refusal

RANKS, CASTS = 2, "mxfp8"  # which has no scale of a whole tensor, and rounds to nearest


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(32, 64, 3, 2, 1, dtype=torch.float64)
        self.second = nn.Conv2d(64, 64, 3, 1, 1, groups=2, dtype=torch.float64)
        self.up = nn.ConvTranspose2d(64, 32, 2, 2, dtype=torch.float64)

    def forward(self, x):
        return self.up(self.second(self.first(x).relu()).relu())


def block():
    torch.manual_seed(0)
    return Block(), torch.randn(RANKS, 32, 8, 8, dtype=torch.float64)


def gradients(model, x):
    model(x).square().mean().backward()
    return {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}


def sharded():
    model, _ = block()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in (model.first, model.second, model.up, model):
        fully_shard(layer, mesh=mesh)
    convert(model, CASTS)
    LayerKeys(model).fill_(0)
    return model


def work():
    rank = torch.distributed.get_rank()
    model, images = block()
    LayerKeys(convert(model, CASTS)).fill_(0)
    found = {"ddp": gradients(DistributedDataParallel(model), images[rank : rank + 1])}
    spread = sharded()
    found["fsdp2"] = gradients(spread, images[rank : rank + 1])
    found["converted"] = sum(isinstance(m, QuantizedConvolution) for m in spread.modules())
    found["gathers"] = refusal(WeightGathers, sharded(), torch.float64, {"first": LinearCasts.preset("int8")})
    return found
