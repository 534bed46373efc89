"""One of four processes that train one small model, spread in all ways.

Where fewer are needed than there are, the first ones take part.
"""

import math
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Shard

from lightning_lowbit.distributed import zeros_sharded_as
from tests.distributed.parameters import (
    MISSING,
    bad_elsewhere,
    collectives,
    masters,
    matrices_of_two_shapes,
    matrices_under_ddp,
    missing_gradients,
    moments_in_cut_blocks,
    partial_gradients,
    place,
    places,
)
from tests.distributed.spreads import HALF, SPREADS, Meshes, Run, Spread, fsdp1

RANKS = 4
WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=False)
# A case, what its checkpoint holds, and where it goes on.
GO_ON = {"parts": ("one process", "fsdp2", "fsdp2 on three", "hsdp"), "whole": ("one process", "fsdp2 on three")}
CASES = ("stable_spam", "adaptive", "fp8", "muon")
RESUMPTIONS = [f"{case}: {kind}, {on}" for case in CASES for kind in GO_ON for on in GO_ON[kind]]


def trajectories(meshes):
    results = {}
    for trajectory in (name for name in sys.argv[3:] if name.partition(": ")[0] in SPREADS):
        name, case = trajectory.split(": ")
        if meshes.has(SPREADS[name].mesh):
            results[trajectory] = meshes.run(case, name).train().outcome()
    return results


def state_of(run, options=None):
    return {
        "model": states.get_model_state_dict(run.wrapped, options=options),
        "optimizer": states.get_optimizer_state_dict(run.wrapped, run.optimizer, options=options),
    }


def resumptions(meshes):
    """The second half of runs that go on from a checkpoint of two ranks, perhaps on other ranks."""
    asked = [name for name in sys.argv[3:] if name in RESUMPTIONS]
    for case in dict.fromkeys(name.split(": ")[0] for name in asked):
        if meshes.has((2,)):
            run = meshes.run(case, "fsdp2").train(end=HALF)
            checkpoints.save(state_of(run), checkpoint_id=f"{case} parts", process_group=meshes[2,].get_group())
            whole = state_of(run, WHOLE)
            if dist.get_rank() == 0:
                torch.save(whole, f"{case} whole")
    dist.barrier()
    results = {}
    for name in asked:
        kind, on = name.split(", ")
        case, mesh = kind.split(": ")[0], None if on == "one process" else meshes[SPREADS[on].mesh]
        takes_part = dist.get_rank() == 0 if mesh is None else meshes.has(SPREADS[on].mesh)
        if takes_part:
            run = Run(case) if mesh is None else meshes.run(case, on)
            load(run, kind.replace(":", ""), mesh)
            results[name] = run.train(HALF).outcome()
    return results


def load(run, path, mesh):
    options = None
    if path.endswith("parts"):
        state = state_of(run)
        group = None if mesh is None or mesh.ndim > 1 else mesh.get_group()
        checkpoints.load(state, checkpoint_id=path, process_group=group, no_dist=mesh is None)
    else:
        state, options = torch.load(path, weights_only=True), None if mesh is None else WHOLE
    states.set_model_state_dict(run.wrapped, state["model"], options=options)
    states.set_optimizer_state_dict(run.wrapped, run.optimizer, state["optimizer"], options=options)


def refusals(meshes):
    """What users are told, on each rank."""
    attempts = {
        "fp8 under fsdp1": ("fp8", SPREADS["fsdp1"], True),
        "muon under fsdp1": ("muon", SPREADS["fsdp1"], True),
        "sparse under fsdp1": ("sparse", SPREADS["fsdp1"], True),
        "sparse with cut rows": ("sparse", SPREADS["tensor parallel"], True),
        "flat buffers": ("stable_spam", Spread((2,), fsdp1(ShardingStrategy.FULL_SHARD, use_orig_params=False)), True),
        "not connected": ("stable_spam", SPREADS["fsdp1"], False),
    }
    told = {}
    for name, (case, spread, connected) in attempts.items():
        if meshes.has(spread.mesh):
            told[name] = message(partial(Run(case, spread, meshes[2,], connected).train, end=1))
    if meshes.has((2,)):
        run = Run("fp8", SPREADS["fsdp1"], meshes[2,], True)
        told["fp8 loaded under fsdp1"] = message(partial(load, run, "fp8 whole", meshes[2,]))
    if meshes.has((3,)):
        p = place(meshes[3,], torch.zeros(2, 260), Shard(1))
        told["rows of lengths that no one else has"] = message(
            partial(zeros_sharded_as, p, lambda length: length if length > 86 else 0, torch.float32)
        )
    return told


def message(attempt):
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def work():
    meshes = Meshes()
    results = {
        "trajectories": trajectories(meshes),
        "resumptions": resumptions(meshes),
        "places": places(meshes),
        "refusals": refusals(meshes),
    }
    if meshes.has((2,)):
        mesh = meshes[2,]
        results["partial"] = partial_gradients(mesh)
        results["collectives"] = {count: collectives(mesh, count) for count in (3, 9)}
        results["matrices"] = matrices_of_two_shapes(mesh)
        results["matrices under DDP"] = matrices_under_ddp(mesh)
        results["cut blocks"] = moments_in_cut_blocks(mesh, "fp8")
    if meshes.has((3,)):
        results["missing"] = {name: missing_gradients(meshes[3,], name) for name in MISSING}
        results["nan elsewhere"] = bad_elsewhere(meshes, math.nan, "ada_gn")
        results["too large elsewhere"] = bad_elsewhere(meshes, 1e20, None)
        results["masters"] = masters(meshes[3,])
    return results
