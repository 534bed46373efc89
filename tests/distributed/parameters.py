"""Single parameters on a mesh: where their elements are, and what an optimizer does with their gradients."""

import math
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbit.distributed import local, local_gradient, offsets_of, sharding_of, zeros_sharded_as
from lightning_lowbit.optim import SPAM, Adaptive, LowBitAdamW, Muon, StableSPAM, connect
from lightning_lowbit.optim.moments import FP8Moments, Piece
from lightning_lowbit.optim.passes import in_pieces
from tests.distributed.spreads import Net, fsdp2_of_tensor_parallel, full

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


def place(mesh, whole, *placements):
    """A parameter on a mesh; a whole one without a mesh."""
    if mesh is None:
        return nn.Parameter(whole)
    return nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def places(meshes):
    """What is known of parameters whose elements are their own index, and what is kept along with them."""
    parameters = {
        name: place(meshes[shape], torch.arange(float(math.prod(size))).view(size), *placements)
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


def last_of_blocks(rows):
    """Of each block of 128 in a row, the last element."""
    return torch.stack([block[:, -1] for block in rows.detach().split(128, dim=1)], dim=1)


def partial_gradients(mesh):
    """The part on this rank of the sum of gradients of 1 and 2."""
    results = {}
    for name, placement in {"rows": Shard(0), "replicas": Replicate()}.items():
        p = place(mesh, torch.zeros(3, 2), placement)
        ones = torch.arange(6.0).view(3, 2) * (dist.get_rank() + 1)
        p.grad = DTensor.from_local(ones, mesh, [Partial()], run_check=False)
        results[name] = local_gradient(p)
    return results


MISSING = {
    "stable_spam": lambda p: StableSPAM(p, reset_interval=3, weight_decay=0.1),
    "adamw": lambda p: LowBitAdamW(p, moments="fp32"),
    # Where it sees no gradient, torch's AdamW does not decay either.
    "adaptive": lambda p: Adaptive(torch.optim.AdamW(p, weight_decay=0.0)),
}


def missing_gradients(mesh, name):
    """A parameter without a gradient on the second rank, where a whole one's is 0; one with a late one; one without."""
    shape = torch.Size((6, 4))
    p, late, idle = (place(mesh, torch.ones(shape, dtype=torch.float64), Shard(0)) for _ in range(3))
    optimizer = MISSING[name]([p, late, idle])
    for step in range(5):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if step >= 2:
            late.grad = place(mesh, gradient.clone(), Shard(0)).data
        gradient[2:4] = 0
        if mesh is None or mesh.get_rank() != 1:
            p.grad = place(mesh, gradient, Shard(0)).data
        optimizer.step()
    return {
        "weights": full(p),
        "late": full(late),
        "idle": full(idle),
        "late steps": optimizer.state[late]["steps"],
        "idle steps": optimizer.state[idle].get("steps", torch.zeros((), dtype=torch.int64)),
    }


def bad_elsewhere(meshes, element, norm_clip):
    """A bad element in the second of three steps, in a parameter of which the third rank has no part."""
    shared = place(meshes[3,], torch.ones(3, 2), Shard(0))
    others = [place(meshes[2,], torch.ones(2, 2), Shard(0))] if meshes.has((2,)) else []
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


def matrices_of_two_shapes(mesh):
    """Weights after two steps of Muon in stacks, and the broadcasts of the second step."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape):
        return place(mesh, torch.randn(shape, generator=generator, dtype=torch.float64), Shard(0))

    shapes = [(6, 4), (4, 9), (6, 4), (4, 9), (6, 4)]
    parameters = [draw(shape) for shape in shapes]
    optimizer = Muon(parameters, adam_names=[])
    with in_pieces(200):
        for _ in range(2):
            for p, shape in zip(parameters, shapes, strict=True):
                p.grad = draw(shape).data
            with CommDebugMode() as seen:
                optimizer.step()
    return {"weights": [full(p) for p in parameters], "broadcasts": broadcasts(seen)}


def broadcasts(seen):
    return sum(count for name, count in seen.get_comm_counts().items() if "broadcast" in str(name))


def matrices_under_ddp(mesh):
    """Broadcasts in a step of Muon where gradients are the same on both ranks, and where they need not be."""
    results = {}
    for name in ("connected", "not connected", "hook", "no_sync", "join", "ignored"):
        layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        if name == "ignored":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layers, ["0.weight"])
        model = DistributedDataParallel(layers, process_group=mesh.get_group())
        if name == "hook":
            model.register_comm_hook(mesh.get_group(), allreduce_hook)
        if name != "not connected":
            connect(model)
        optimizer = Muon(model.parameters(), adam_names=[])
        with {"no_sync": model.no_sync, "join": partial(Join, [model])}.get(name, nullcontext)():
            model(torch.ones(2, 4)).sum().backward()
            with CommDebugMode() as seen:
                optimizer.step()
        results[name] = broadcasts(seen)
    return results


COUNTED = {
    "stable_spam": lambda p: StableSPAM(p),
    "stable_spam fp8": lambda p: StableSPAM(p, moments="fp8"),
    "spam": lambda p: SPAM(p),
    "adamw": lambda p: LowBitAdamW(p),
    "adaptive": lambda p: Adaptive(torch.optim.AdamW(p)),
}


def collectives(mesh, parameters):
    """How many collectives are in a second step."""
    results = {}
    for name, make in COUNTED.items():
        given = [place(mesh, torch.ones(4, 3), Shard(0)) for _ in range(parameters)]
        # Two groups: what they have in common is not measured twice.
        optimizer = make([{"params": given[:2]}, {"params": given[2:], "lr": 1e-4}])
        for p in given:
            p.grad = place(mesh, torch.ones(4, 3), Shard(0)).data
        optimizer.step()
        with CommDebugMode() as seen:
            optimizer.step()
        results[name] = seen.get_total_counts()
    return results


def moments_in_cut_blocks(mesh, moments):
    """Both moments after some steps; 130 columns on each rank, and both ranks with the same gradients."""
    p = place(mesh, torch.zeros(64, 260), Shard(1))
    optimizer = LowBitAdamW([p], moments=moments)
    for step in range(20):
        half = torch.randn(64, 130, generator=torch.Generator().manual_seed(step))
        p.grad = place(mesh, torch.cat([half, half], dim=1), Shard(1)).data
        optimizer.step()
    state = optimizer.state[p]
    if moments == "fp32":
        return {name: state[name] for name in ("mean", "mean_square")}
    format = FP8Moments()
    mean, mean_square = format.load(Piece({name: local(state[name]) for name in format.names}))
    return {"mean": mean, "mean_square": mean_square}


def masters(mesh):
    """What bf16 parameters, their fp16 masters and the scale of these become."""
    whole = torch.randn(7, 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    p = place(mesh, whole, Shard(0))
    optimizer = LowBitAdamW([p], lr=1e-4, moments="fp32", master_weights="fp16")
    for step in range(10):
        gradient = torch.randn(7, 20, generator=torch.Generator().manual_seed(step)).bfloat16()
        p.grad = place(mesh, gradient, Shard(0)).data
        optimizer.step()
    state = optimizer.state[p]
    return {"weights": full(p), "master": full(state["master"]), "scale": state["master_scale"]}
