"""A small model in training, whole or spread over ranks in all ways."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbit.distributed import local_gradient
from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, Muon, StableSPAM, connect
from lightning_lowbit.optim.optimizer import ClippedOptimizer

STEPS, HALF = 12, 6
SPIKES = (4, 22)  # steps in which inputs are large
BAD = 8  # the step with a NaN, in one element


class Net(nn.Module):
    """Rows that do not divide by three, and fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.up, self.down, self.out = nn.Linear(16, 32), nn.Linear(32, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.down(torch.relu(self.up(x))))


def batch_of(step, dtype):
    generator = torch.Generator().manual_seed(step)
    size = 50.0 if step in SPIKES else 1.0
    x, y = size * torch.randn(12, 16, generator=generator), torch.randn(12, 1, generator=generator)
    return x.to(dtype), y.to(dtype)


class Case(NamedTuple):
    """An optimizer, and how it is tried. In float64 nothing but a mistake tells two trajectories apart."""

    make: Callable[[Iterable[Tensor]], ClippedOptimizer]
    steps: int = STEPS
    dtype: torch.dtype = torch.float64


CASES = {
    "stable_spam": Case(lambda p: StableSPAM(p, lr=1e-2, reset_interval=5, weight_decay=0.1)),
    "in fp32": Case(lambda p: StableSPAM(p, reset_interval=5, weight_decay=0.1), dtype=torch.float32),
    "adaptive": Case(lambda p: Adaptive(torch.optim.AdamW(p, lr=1e-2))),
    "grad_clip": Case(lambda p: StableSPAM(p, lr=1e-2, norm_clip="grad_clip")),
    "adamw": Case(lambda p: LowBitAdamW(p, lr=1e-2, moments="fp32")),
    "muon": Case(lambda p: Muon(p, lr=1e-2, adam_names=[], element_clip="ada_clip")),
    "muon fp8": Case(lambda p: Muon(p, adam_names=[], element_clip="ada_clip", moments="fp8"), dtype=torch.float32),
    # 20 steps pass before anything is clipped.
    "spam": Case(lambda p: SPAM(p, lr=1e-2, spike_threshold=2, reset_interval=24, warmup_steps=3), steps=27),
    "sparse": Case(lambda p: SPAM(p, lr=1e-2, reset_interval=5, warmup_steps=0, density=0.5)),
    "fp8": Case(lambda p: StableSPAM(p, reset_interval=5, moments="fp8"), dtype=torch.float32),
    "fp8 adamw": Case(lambda p: LowBitAdamW(p), dtype=torch.float32),
}


class Spread(NamedTuple):
    """A way to spread a model.

    Attributes:
        mesh: its shape.
        wrap: makes it of model and mesh.
        cases: names of those that are tried.
        batch: over which dimensions of the mesh the batch is spread.
        elements: over which ones the parameters are.
    """

    mesh: tuple[int, ...]
    wrap: Callable[[Any, DeviceMesh], nn.Module]
    cases: tuple[str, ...] = ()
    batch: tuple[int, ...] = (0,)
    elements: tuple[int, ...] = (0,)


def ddp(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group())


def fsdp2(model, mesh):
    for part in (model.up, model.down, model.out, model):
        fully_shard(part, mesh=mesh)
    return model


def tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp2_of_tensor_parallel(model, mesh):
    tensor_parallel(model, mesh["second"])
    return fsdp2(model, mesh["first"])


def fsdp1(strategy, use_orig_params=True):
    def wrap(model, mesh):
        group = mesh.get_group() if mesh.ndim == 1 else (mesh.get_group(1), mesh.get_group(0))
        options = {"sharding_strategy": strategy, "device_id": torch.device("cpu")}
        options["use_orig_params"] = use_orig_params
        model.up = FullyShardedDataParallel(model.up, group, **options)
        return FullyShardedDataParallel(model, group, **options)

    return wrap


ALWAYS = ("stable_spam", "in fp32", "adaptive")
BY_ROWS = ("fp8", "fp8 adamw", "sparse")

SPREADS = {
    "ddp": Spread((2,), ddp, ("in fp32", "adaptive", "fp8", "muon"), elements=()),
    "fsdp2": Spread((2,), fsdp2, (*ALWAYS, "fp8", "muon")),
    "fsdp2 on three": Spread((3,), fsdp2, (*ALWAYS, *BY_ROWS, "spam", "muon", "muon fp8")),
    "hsdp": Spread((2, 2), fsdp2, (*ALWAYS, "fp8", "muon"), batch=(0, 1), elements=(1,)),
    "tensor parallel": Spread((2,), tensor_parallel, (*ALWAYS, "spam", "muon"), batch=()),
    "fsdp2 of tensor parallel": Spread(
        (2, 2), fsdp2_of_tensor_parallel, (*ALWAYS, "grad_clip", "adamw", "muon"), elements=(0, 1)
    ),
    "fsdp1": Spread((2,), fsdp1(ShardingStrategy.FULL_SHARD), (*ALWAYS, "spam")),
    "fsdp1 on three": Spread((3,), fsdp1(ShardingStrategy.FULL_SHARD), (*ALWAYS, "grad_clip", "adamw")),
    "fsdp1 hybrid": Spread((2, 2), fsdp1(ShardingStrategy.HYBRID_SHARD), ALWAYS, batch=(0, 1), elements=(1,)),
    "fsdp1 not sharded": Spread((2,), fsdp1(ShardingStrategy.NO_SHARD), ("in fp32", *BY_ROWS), elements=()),
}


class Run:
    """A model in training: whole without a spread, otherwise the part of this rank."""

    def __init__(self, case, spread=None, mesh=None, connected=True):
        self.case, self.model, self.share, self.shares = CASES[case], Net(), 0, 1
        self.model.to(self.case.dtype)
        self.wrapped = self.model
        self.is_last = True  # of the ranks that hold parts
        if spread is not None:
            assert mesh is not None and (place := mesh.get_coordinate()) is not None
            self.wrapped = spread.wrap(self.model, mesh)
            self.is_last = all(place[dim] == mesh.size(dim) - 1 for dim in spread.elements)
            for dim in spread.batch:
                self.share = self.share * mesh.size(dim) + place[dim]
                self.shares *= mesh.size(dim)
        if connected:
            connect(self.wrapped)
        self.optimizer = self.case.make(self.wrapped.parameters())
        self.statistics = []
        self.collectives = {}

    def train(self, first=0, end=None):
        for step in range(first, self.case.steps if end is None else end):
            x, y = (tensor.chunk(self.shares)[self.share] for tensor in batch_of(step, self.case.dtype))
            self.optimizer.zero_grad()
            F.mse_loss(self.wrapped(x), y).backward()
            if step == BAD and self.is_last:
                self._poison()
            if step == HALF:
                with CommDebugMode() as seen:
                    self.optimizer.step()
                self.collectives = {str(function): count for function, count in seen.get_comm_counts().items()}
            else:
                self.optimizer.step()
            statistics = self.optimizer.gradient_statistics()
            self.statistics.append(
                {name: torch.stack([x.double() for x in statistics[p]]) for name, p in self._named_parameters()}
            )
        return self

    def _named_parameters(self):
        for name, parameter in self.wrapped.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", "").removeprefix("module."), parameter

    def _poison(self):
        for parameter in self.wrapped.parameters():
            gradient = local_gradient(parameter)
            if gradient is not None and gradient.numel():
                gradient.view(-1)[-1] = math.nan
                return

    def weights(self):
        if isinstance(self.wrapped, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.wrapped, writeback=False):
                return {name: p.detach().clone() for name, p in self._named_parameters()}
        return {name: full(p) for name, p in self._named_parameters()}

    def outcome(self):
        return {"weights": self.weights(), "statistics": self.statistics, "collectives": self.collectives}


def full(tensor):
    """All of it, on all ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Meshes(dict[tuple[int, ...], DeviceMesh]):
    """Meshes of the first ranks, by shape."""

    def __init__(self):
        super().__init__({(n,): DeviceMesh("cpu", list(range(n))) for n in (2, 3)})
        self[2, 2] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("first", "second"))

    def has(self, shape):
        return self[shape].get_coordinate() is not None

    def run(self, case, spread):
        return Run(case, SPREADS[spread], self[SPREADS[spread].mesh])
