"""One of four processes that train one small model, spread in all ways.

Where fewer are needed than there are, the first ones take part.
"""

import math
import sys
from functools import partial

import torch
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Shard

from lightning_lowbit.distributed import zeros_sharded_as
from tests.distributed.parameters import (
    MISSING,
    bad_elsewhere,
    collectives,
    masters,
    missing_gradients,
    moments_in_cut_blocks,
    partial_gradients,
    place,
    places,
)
from tests.distributed.resumptions import resumptions
from tests.distributed.spreads import SPREADS, Meshes, Run, Spread, fsdp1

RANKS = 4


def trajectories(meshes):
    results = {}
    for trajectory in (name for name in sys.argv[3:] if name.partition(": ")[0] in SPREADS):
        name, case = trajectory.split(": ")
        if meshes.has(SPREADS[name].mesh):
            results[trajectory] = meshes.run(case, name).train().outcome()
    return results


def refusals(meshes):
    """What users are told, on each rank."""
    attempts = {
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
        results["collectives"] = {count: collectives(mesh, count) for count in (3, 40)}
        results["cut blocks"] = moments_in_cut_blocks(mesh, "fp8")
    if meshes.has((3,)):
        results["missing"] = {name: missing_gradients(meshes[3,], name) for name in MISSING}
        results["nan elsewhere"] = bad_elsewhere(meshes, math.nan, "ada_gn")
        results["too large elsewhere"] = bad_elsewhere(meshes, 1e20, None)
        results["masters"] = masters(meshes[3,])
    return results
