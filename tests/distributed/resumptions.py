"""Runs that continue from a checkpoint, perhaps on other ranks."""

import sys
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

from tests.distributed.spreads import HALF, SPREADS, Run

SAVED = ("stable_spam", "adaptive", "fp8")


def resumptions(meshes):
    """The second half of runs that go on from a checkpoint of two ranks, perhaps on other ranks."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=False)
    results = {}
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


def load_parts(run, folder, mesh=None):
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


def flat_resumptions(meshes):
    """The same of FSDP1; its parts can only go on where they were."""
    results = {}
    for kind, to in (("whole", "fsdp1 on three"), ("parts", "fsdp1")):
        state = [None]
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
