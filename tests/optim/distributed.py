"""One of four processes that train one small model, spread in all ways:
``python -m tests.optim.distributed 0 FOLDER RUN …``.

What it saw and what came out lies in ``FOLDER/0.pt``, of the other ranks in ``FOLDER/1.pt`` and so on. Where fewer are
needed than there are, the first ones take part.
"""

import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbit.distributed import local, local_gradient, offsets_of, sharding_of, zeros_sharded_as
from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, StableSPAM, connect
from lightning_lowbit.optim.guarded_optimizer import GuardedOptimizer
from lightning_lowbit.optim.moments import FP8Moments, Piece
from tests.launch import take_part

RANKS = 4
# --- what is trained ---

STEPS, HALF = 12, 6
SPIKES = (4, 22)  # steps in which inputs are large
BAD = 8  # the step with a NaN, in one element


class Net(nn.Module):
    """Rows that do not divide by three, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.up, self.down, self.out = nn.Linear(16, 32), nn.Linear(32, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(torch.relu(self.up(x))))


def batch_of(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    size = 50.0 if step in SPIKES else 1.0
    x, y = size * torch.randn(12, 16, generator=generator), torch.randn(12, 1, generator=generator)
    return x.to(dtype), y.to(dtype)


class Case(NamedTuple):
    """An optimizer, and how it is tried. In float64 nothing but a mistake tells two trajectories apart."""

    make: Callable[[Iterable[Tensor]], GuardedOptimizer]
    steps: int = STEPS
    dtype: torch.dtype = torch.float64


CASES = {
    "stable_spam": Case(lambda p: StableSPAM(p, lr=1e-2, reset_interval=5, weight_decay=0.1)),
    "in fp32": Case(lambda p: StableSPAM(p, reset_interval=5, weight_decay=0.1), dtype=torch.float32),
    "adaptive": Case(lambda p: Adaptive(torch.optim.AdamW(p, lr=1e-2))),
    "grad_clip": Case(lambda p: StableSPAM(p, lr=1e-2, norm_clip="grad_clip")),
    "adamw": Case(lambda p: LowBitAdamW(p, lr=1e-2, moments="fp32")),
    # 20 steps pass before anything is clipped.
    "spam": Case(lambda p: SPAM(p, lr=1e-2, spike_threshold=2, reset_interval=24, warmup_steps=3), steps=27),
    "sparse": Case(lambda p: SPAM(p, lr=1e-2, reset_interval=5, warmup_steps=0, density=0.5)),
    "fp8": Case(lambda p: StableSPAM(p, reset_interval=5, moments="fp8"), dtype=torch.float32),
    "fp8 adamw": Case(lambda p: LowBitAdamW(p), dtype=torch.float32),
}

# --- ways to spread it ---


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


def ddp(model: Net, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def fsdp2(model: Net, mesh: DeviceMesh) -> nn.Module:
    for part in (model.up, model.down, model.out, model):
        fully_shard(part, mesh=mesh)
    return model


def tensor_parallel(model: Net, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp2_of_tensor_parallel(model: Net, mesh: DeviceMesh) -> nn.Module:
    tensor_parallel(model, mesh["second"])
    return fsdp2(model, mesh["first"])


def fsdp1(strategy: ShardingStrategy, use_orig_params: bool = True) -> Callable[[Any, DeviceMesh], nn.Module]:
    def wrap(model: Any, mesh: DeviceMesh) -> nn.Module:
        group = mesh.get_group() if mesh.ndim == 1 else (mesh.get_group(1), mesh.get_group(0))
        options: Any = {"sharding_strategy": strategy, "device_id": torch.device("cpu")}
        options["use_orig_params"] = use_orig_params
        model.up = FullyShardedDataParallel(model.up, group, **options)
        return FullyShardedDataParallel(model, group, **options)

    return wrap


ALWAYS = ("stable_spam", "in fp32", "adaptive")
BY_ROWS = ("fp8", "fp8 adamw", "sparse")

SPREADS = {
    "ddp": Spread((2,), ddp, ("in fp32", "adaptive", "fp8"), elements=()),
    "fsdp2": Spread((2,), fsdp2, (*ALWAYS, "fp8")),
    "fsdp2 on three": Spread((3,), fsdp2, (*ALWAYS, *BY_ROWS, "spam")),
    "hsdp": Spread((2, 2), fsdp2, (*ALWAYS, "fp8"), batch=(0, 1), elements=(1,)),
    "tensor parallel": Spread((2,), tensor_parallel, (*ALWAYS, "spam"), batch=()),
    "fsdp2 of tensor parallel": Spread(
        (2, 2), fsdp2_of_tensor_parallel, (*ALWAYS, "grad_clip", "adamw"), elements=(0, 1)
    ),
    "fsdp1": Spread((2,), fsdp1(ShardingStrategy.FULL_SHARD), (*ALWAYS, "spam")),
    "fsdp1 on three": Spread((3,), fsdp1(ShardingStrategy.FULL_SHARD), (*ALWAYS, "grad_clip", "adamw")),
    "fsdp1 hybrid": Spread((2, 2), fsdp1(ShardingStrategy.HYBRID_SHARD), ALWAYS, batch=(0, 1), elements=(1,)),
    "fsdp1 not sharded": Spread((2,), fsdp1(ShardingStrategy.NO_SHARD), ("in fp32", *BY_ROWS), elements=()),
}


class Run:
    """A model in training: whole without a spread, otherwise the part of this rank."""

    def __init__(
        self, case: str, spread: Spread | None = None, mesh: DeviceMesh | None = None, connected: bool = True
    ) -> None:
        self.case, self.model, self.share, self.shares = CASES[case], Net(), 0, 1
        self.model.to(self.case.dtype)
        self.wrapped: nn.Module = self.model
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
        self.statistics: list[dict[str, Tensor]] = []
        self.collectives: dict[str, int] = {}

    def train(self, first: int = 0, end: int | None = None) -> "Run":
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

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self.wrapped.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", "").removeprefix("module."), parameter

    def _poison(self) -> None:
        for parameter in self.wrapped.parameters():
            gradient = local_gradient(parameter)
            if gradient is not None and gradient.numel():
                gradient.view(-1)[-1] = math.nan
                return

    def weights(self) -> dict[str, Tensor]:
        if isinstance(self.wrapped, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.wrapped, writeback=False):
                return {name: p.detach().clone() for name, p in self._named_parameters()}
        return {name: full(p) for name, p in self._named_parameters()}

    def outcome(self) -> dict[str, Any]:
        return {"weights": self.weights(), "statistics": self.statistics, "collectives": self.collectives}


def full(tensor: Tensor) -> Tensor:
    """All of it, on all ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Meshes(dict[tuple[int, ...], DeviceMesh]):
    """Meshes of the first ranks, by shape."""

    def __init__(self) -> None:
        super().__init__({(n,): DeviceMesh("cpu", list(range(n))) for n in (2, 3)})
        self[2, 2] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("first", "second"))

    def has(self, shape: tuple[int, ...]) -> bool:
        return self[shape].get_coordinate() is not None

    def run(self, case: str, spread: str) -> Run:
        return Run(case, SPREADS[spread], self[SPREADS[spread].mesh])


def trajectories(meshes: Meshes) -> dict[str, Any]:
    results = {}
    for trajectory in (name for name in sys.argv[3:] if name.partition(": ")[0] in SPREADS):
        name, case = trajectory.split(": ")
        if meshes.has(SPREADS[name].mesh):
            results[trajectory] = meshes.run(case, name).train().outcome()
    return results


# --- checkpoints ---

SAVED = ("stable_spam", "adaptive", "fp8")


def resumptions(meshes: Meshes) -> dict[str, Any]:
    """The second half of runs that go on from a checkpoint of two ranks, perhaps on other ranks."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=False)
    results: dict[str, Any] = {}
    for case in SAVED:
        if meshes.has((2,)):
            run = meshes.run(case, "fsdp2").train(end=HALF)
            parts = {
                "model": get_model_state_dict(run.wrapped),
                "optimizer": get_optimizer_state_dict(run.wrapped, run.optimizer),
            }
            checkpoints.save(parts, checkpoint_id=f"{case} parts", process_group=meshes[2,].get_group())
            state = {
                "model": get_model_state_dict(run.wrapped, options=whole),
                "optimizer": get_optimizer_state_dict(run.wrapped, run.optimizer, options=whole),
            }
            if dist.get_rank() == 0:
                torch.save(state, f"{case} whole.pt")
        dist.barrier()
        asked = [name.removeprefix(f"{case}: ") for name in sys.argv[3:] if name.startswith(f"{case}: ")]
        for name in ("fsdp2", "fsdp2 on three", "hsdp"):
            if f"parts, {name}" in asked and meshes.has(SPREADS[name].mesh):
                run = meshes.run(case, name)
                load_parts(run, f"{case} parts", meshes[SPREADS[name].mesh])
                results[f"{case}: parts, {name}"] = run.train(HALF).outcome()
        if "whole, fsdp2 on three" in asked and meshes.has((3,)):
            run, state = meshes.run(case, "fsdp2 on three"), torch.load(f"{case} whole.pt", weights_only=True)
            set_model_state_dict(run.wrapped, state["model"], options=whole)
            set_optimizer_state_dict(run.wrapped, run.optimizer, state["optimizer"], options=whole)
            results[f"{case}: whole, fsdp2 on three"] = run.train(HALF).outcome()
        if dist.get_rank() == 0 and "parts, one process" in asked:
            run = Run(case)
            load_parts(run, f"{case} parts")
            results[f"{case}: parts, one process"] = run.train(HALF).outcome()
        if dist.get_rank() == 0 and "whole, one process" in asked:
            run, state = Run(case), torch.load(f"{case} whole.pt", weights_only=True)
            set_model_state_dict(run.wrapped, state["model"])
            set_optimizer_state_dict(run.wrapped, run.optimizer, state["optimizer"])
            results[f"{case}: whole, one process"] = run.train(HALF).outcome()
    return results


def load_parts(run: Run, folder: str, mesh: DeviceMesh | None = None) -> None:
    state = {
        "model": get_model_state_dict(run.wrapped),
        "optimizer": get_optimizer_state_dict(run.wrapped, run.optimizer),
    }
    group = None if mesh is None or mesh.ndim > 1 else mesh.get_group()
    checkpoints.load(state, checkpoint_id=folder, process_group=group, no_dist=mesh is None)
    set_model_state_dict(run.wrapped, state["model"])
    set_optimizer_state_dict(run.wrapped, run.optimizer, state["optimizer"])


FLAT_STATES = {
    "whole": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False)),
    "parts": (StateDictType.SHARDED_STATE_DICT, None, None),
}


def flat_resumptions(meshes: Meshes) -> dict[str, Any]:
    """The same of FSDP1; its parts can only go on where they were."""
    results = {}
    for kind, to in (("whole", "fsdp1 on three"), ("parts", "fsdp1")):
        state: list[Any] = [None]
        if meshes.has((2,)):
            group = meshes[2,].get_group()
            run = meshes.run("stable_spam", "fsdp1").train(end=HALF)
            # torch 2.13 gathers each state into the same buffer and keeps it by `.cpu()`: on a CPU that is no copy.
            copies = patch.object(Tensor, "cpu", Tensor.clone)
            with copies, FullyShardedDataParallel.state_dict_type(run.wrapped, *FLAT_STATES[kind]):
                optimizer = FullyShardedDataParallel.optim_state_dict(run.wrapped, run.optimizer, group=group)
                state = [{"model": run.wrapped.state_dict(), "optimizer": optimizer}]
        if kind == "whole":
            dist.broadcast_object_list(state)
        if meshes.has(SPREADS[to].mesh):
            run = meshes.run("stable_spam", to)
            with FullyShardedDataParallel.state_dict_type(run.wrapped, *FLAT_STATES[kind]):
                run.wrapped.load_state_dict(state[0]["model"])
                optimizer = FullyShardedDataParallel.optim_state_dict_to_load(
                    run.wrapped, run.optimizer, state[0]["optimizer"], group=meshes[SPREADS[to].mesh].get_group()
                )
            run.optimizer.load_state_dict(optimizer)
            results[f"{kind}, {to}"] = run.train(HALF).weights()
    return results


# --- single parameters on a mesh ---

PLACED = {
    "rows": ((3,), (7, 260), (Shard(0),)),
    "fewer rows than ranks": ((3,), (2, 260), (Shard(0),)),
    "columns": ((2,), (4, 260), (Shard(1),)),
    "columns on three": ((3,), (4, 400), (Shard(1),)),
    "rows and columns": ((2, 2), (5, 260), (Shard(0), Shard(1))),
    "columns twice": ((2, 2), (2, 514), (Shard(1), Shard(1))),
    "replicas of rows": ((2, 2), (5, 260), (Replicate(), Shard(0))),
    "replicas": ((2,), (3, 260), (Replicate(),)),
}


def place(mesh: DeviceMesh, whole: Tensor, placements: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def places(meshes: Meshes) -> dict[str, Any]:
    """What is known of parameters whose elements are their own index, and what is kept along with them."""
    parameters = {
        name: place(meshes[shape], torch.arange(float(math.prod(size))).view(size), placements)
        for name, (shape, size, placements) in PLACED.items()
        if meshes.has(shape)
    }
    if meshes.has((2, 2)):
        model = Net()
        with torch.no_grad():
            model.up.weight.copy_(torch.arange(512.0).view(32, 16))
        parameters["rows twice"] = fsdp2_of_tensor_parallel(model, meshes[2, 2]).up.weight
    results = {}
    for name, p in parameters.items():
        kept, sharding = zeros_sharded_as(p, lambda length: -(-length // 128), torch.float32), sharding_of(p)
        local(kept).copy_(last_of_blocks(local(p)))
        results[name] = {
            "shape": tuple(sharding.shape),
            "ranks": [dist.get_process_group_ranks(group) for group in sharding.groups],
            "is_flat": sharding.is_flat,
            "part": local(p).detach().clone(),
            "offsets": offsets_of(p),
            "kept": kept.full_tensor(),
        }
    return results


def last_of_blocks(rows: Tensor) -> Tensor:
    """Of each block of 128 in a row, the last element."""
    return torch.stack([block[:, -1] for block in rows.detach().split(128, dim=1)], dim=1)


def partial_gradients(mesh: DeviceMesh) -> dict[str, Tensor]:
    """The part on this rank of the sum of gradients of 1 and 2."""
    results = {}
    for name, placement in {"rows": Shard(0), "replicas": Replicate()}.items():
        p = place(mesh, torch.zeros(3, 2), [placement])
        ones = torch.arange(6.0).view(3, 2) * (dist.get_rank() + 1)
        p.grad = DTensor.from_local(ones, mesh, [Partial()], run_check=False)
        gradient = local_gradient(p)
        assert gradient is not None
        results[name] = gradient
    return results


MISSING: dict[str, Callable[[Any], GuardedOptimizer]] = {
    "stable_spam": lambda p: StableSPAM(p, reset_interval=3, weight_decay=0.1),
    "adamw": lambda p: LowBitAdamW(p, moments="fp32"),
    # Where it sees no gradient, torch's AdamW does not decay either.
    "adaptive": lambda p: Adaptive(torch.optim.AdamW(p, weight_decay=0.0)),
}


def missing_gradients(mesh: DeviceMesh | None, name: str) -> dict[str, Tensor]:
    """A parameter without a gradient on the second rank, where a whole one's is 0; one with a late one; one without."""
    shape = torch.Size((6, 4))
    p, late, idle = (nn.Parameter(torch.ones(shape, dtype=torch.float64)) for _ in range(3))
    if mesh is not None:
        p, late, idle = (place(mesh, whole.detach(), [Shard(0)]) for whole in (p, late, idle))
    optimizer = MISSING[name]([p, late, idle])
    for step in range(5):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if step >= 2:
            late.grad = gradient.clone() if mesh is None else place(mesh, gradient, [Shard(0)]).data
        gradient[2:4] = 0
        if mesh is None:
            p.grad = gradient
        elif mesh.get_rank() != 1:
            p.grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
    return {
        "weights": full(p),
        "late": full(late),
        "idle": full(idle),
        "late steps": optimizer.state[late]["steps"],
        "idle steps": optimizer.state[idle].get("steps", torch.zeros((), dtype=torch.int64)),
    }


def bad_elsewhere(meshes: Meshes, element: float, norm_clip: str | None) -> dict[str, Any]:
    """A bad element in the second of three steps, in a parameter of which the third rank has no part."""
    shared = place(meshes[3,], torch.ones(3, 2), [Shard(0)])
    others = [place(meshes[2,], torch.ones(2, 2), [Shard(0)])] if meshes.has((2,)) else []
    optimizer = StableSPAM([*others, shared], norm_clip=norm_clip)
    for step in range(3):
        for p in (*others, shared):
            p.grad = torch.ones_like(p)
        if step == 1 and others and dist.get_rank() == 1:
            local(others[0].grad)[0, 0] = element
        with CommDebugMode() as seen:
            optimizer.step()
    return {
        "steps": [int(optimizer.state[p]["steps"]) for p in (*others, shared)],
        "collectives": seen.get_total_counts(),
    }


COUNTED: dict[str, Callable[[Any], GuardedOptimizer]] = {
    "stable_spam": lambda p: StableSPAM(p),
    "stable_spam fp8": lambda p: StableSPAM(p, moments="fp8"),
    "spam": lambda p: SPAM(p),
    "adamw": lambda p: LowBitAdamW(p),
    "adaptive": lambda p: Adaptive(torch.optim.AdamW(p)),
}


def collectives(mesh: DeviceMesh, parameters: int) -> dict[str, int]:
    """How many collectives are in a second step."""
    results = {}
    for name, make in COUNTED.items():
        given = [place(mesh, torch.ones(4, 3), [Shard(0)]) for _ in range(parameters)]
        # Two groups: what they have in common is not measured twice.
        optimizer = make([{"params": given[:2]}, {"params": given[2:], "lr": 1e-4}])
        for p in given:
            p.grad = place(mesh, torch.ones(4, 3), [Shard(0)]).data
        optimizer.step()
        with CommDebugMode() as seen:
            optimizer.step()
        results[name] = seen.get_total_counts()
    return results


def moments_in_cut_blocks(mesh: DeviceMesh | None, moments: str) -> dict[str, Tensor]:
    """Both moments after some steps; 130 columns on each rank, and both ranks with the same gradients."""
    p = nn.Parameter(torch.zeros(64, 260))
    if mesh is not None:
        p = place(mesh, p.detach(), [Shard(1)])
    optimizer = LowBitAdamW([p], moments=moments)
    for step in range(20):
        half = torch.randn(64, 130, generator=torch.Generator().manual_seed(step))
        gradient = torch.cat([half, half], dim=1)
        p.grad = gradient if mesh is None else place(mesh, gradient, [Shard(1)]).data
        optimizer.step()
    state = optimizer.state[p]
    if moments == "fp32":
        return {name: state[name] for name in ("mean", "mean_square")}
    format = FP8Moments()
    mean, mean_square = format.load(Piece({name: local(state[name]) for name in format.names}))
    return {"mean": mean, "mean_square": mean_square}


def masters(mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """What bf16 parameters, their fp16 masters and the scale of these become."""
    whole = torch.randn(7, 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    p = nn.Parameter(whole) if mesh is None else place(mesh, whole, [Shard(0)])
    optimizer = LowBitAdamW([p], lr=1e-4, moments="fp32", master_weights="fp16")
    for step in range(10):
        gradient = torch.randn(7, 20, generator=torch.Generator().manual_seed(step)).bfloat16()
        p.grad = gradient if mesh is None else place(mesh, gradient, [Shard(0)]).data
        optimizer.step()
    state = optimizer.state[p]
    return {"weights": full(p), "master": full(state["master"]), "scale": state["master_scale"]}


def refusals(meshes: Meshes) -> dict[str, str]:
    """What users are told, on each rank."""
    attempts: dict[str, tuple[str, Spread, bool]] = {
        "fp8 under fsdp1": ("fp8", SPREADS["fsdp1"], True),
        "sparse under fsdp1": ("sparse", SPREADS["fsdp1"], True),
        "sparse with cut rows": ("sparse", SPREADS["tensor parallel"], True),
        "flat buffers": ("stable_spam", Spread((2,), fsdp1(ShardingStrategy.FULL_SHARD, use_orig_params=False)), True),
        "not connected": ("stable_spam", SPREADS["fsdp1"], False),
    }
    told = {}
    for name, (case, spread, connected) in attempts.items():
        if meshes.has(spread.mesh):
            told[name] = message(partial(Run(case, spread, meshes[2,], connected).train, end=1))
    if meshes.has((3,)):
        p = place(meshes[3,], torch.zeros(2, 260), [Shard(1)])
        told["rows of lengths that no one else has"] = message(
            partial(zeros_sharded_as, p, lambda length: length if length > 86 else 0, torch.float32)
        )
    return told


def message(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def work() -> dict[str, Any]:
    meshes = Meshes()
    results: dict[str, Any] = {
        "trajectories": trajectories(meshes),
        "resumptions": resumptions(meshes),
        "flat resumptions": flat_resumptions(meshes),
        "places": places(meshes),
        "refusals": refusals(meshes),
    }
    if meshes.has((2,)):
        mesh = meshes[2,]
        results["partial"] = partial_gradients(mesh)
        results["collectives"] = {count: collectives(mesh, count) for count in (3, 40)}
        results["cut blocks"] = moments_in_cut_blocks(mesh, "fp8")
    if meshes.has((3,)):
        results["missing"] = {name: missing_gradients(meshes[3,], name) for name in MISSING}
        results["nan elsewhere"] = bad_elsewhere(meshes, math.nan, "ada_gn")
        results["too large elsewhere"] = bad_elsewhere(meshes, 1e20, None)
        results["masters"] = masters(meshes[3,])
    return results


if __name__ == "__main__":
    take_part(RANKS, work)
