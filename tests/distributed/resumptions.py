"""Runs that continue from a checkpoint, perhaps on other ranks."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
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
