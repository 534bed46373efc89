"""Copies of the training state (of local shards), restored in place: DDP and compiled steps refer to its tensors."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_lowbit.distributed import local

# Optimizer options that schedules and switches set. All others are the optimizer's state, such as Prodigy's estimate of
# the learning rate.
_SCHEDULED = {"params", "lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "initial_weight_decay"}
_SCHEDULED |= {"betas", "momentum", "base_momentum", "max_momentum"}


class TrainingState(NamedTuple):
    """What to copy: weights and buffers, optimizers, and others whose ``state_dict`` is the same on all ranks.

    ``copies`` are the tensors of each copy of weights, see :mod:`.copies`.
    """

    weights: Sequence[Tensor]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Sequence[Any]
    copies: Mapping[str, Sequence[Tensor]]


class Snapshot:
    """A reusable copy on ``device`` (``"same"``: that of the original), after ``step`` steps (None without one)."""

    def __init__(self, device: str = "same") -> None:
        self.step: int | None = None
        self._device = device
        self._kept: list[Any] = [None] * 5

    @torch.no_grad()
    def take(self, step: int, trained: TrainingState) -> None:
        groups = [group for optimizer in trained.optimizers for group in optimizer.param_groups]
        kept = [
            list(trained.weights),
            [optimizer.state for optimizer in trained.optimizers],
            [{name: value for name, value in group.items() if name not in _SCHEDULED} for group in groups],
            [other.state_dict() for other in trained.others],
            {place: list(tensors) for place, tensors in trained.copies.items()},
        ]
        self._kept, self.step = self._keep(kept, self._kept), step

    @torch.no_grad()
    def put_back(self, trained: TrainingState) -> list[str]:
        """Restores the training state; returns the places of copies that are not as when the snapshot was taken."""
        weights, states, options, others, copies = self._kept
        pairs = [*zip(trained.weights, weights, strict=True)]
        strange = []
        for place, tensors in trained.copies.items():
            copied = copies.get(place, ())
            if [local(tensor).shape for tensor in tensors] == [one.shard.shape for one in copied]:
                pairs += zip(tensors, copied, strict=True)
            else:
                strange.append(place)
        for weight, one in pairs:
            local(weight).copy_(one.shard)
        for optimizer, state in zip(trained.optimizers, states, strict=True):
            _put_back(state, optimizer.state)
        groups = [group for optimizer in trained.optimizers for group in optimizer.param_groups]
        for group, kept in zip(groups, options, strict=False):  # groups may have been added since
            group.update({name: _put_back(value, group.get(name)) for name, value in kept.items()})
        for other, kept in zip(trained.others, others, strict=True):
            other.load_state_dict(_put_back(kept, None))
        return strange

    def _keep(self, value: Any, slot: Any) -> Any:
        if isinstance(value, Tensor):
            return self._keep_tensor(value, slot)
        if isinstance(value, Mapping):
            slots = slot if isinstance(slot, Mapping) else {}
            return {key: self._keep(item, slots.get(key)) for key, item in value.items()}
        if isinstance(value, list):
            olds = slot if isinstance(slot, list) and len(slot) == len(value) else [None] * len(value)
            return [self._keep(item, old) for item, old in zip(value, olds, strict=True)]
        return deepcopy(value)

    def _keep_tensor(self, tensor: Tensor, slot: Any) -> "_Copy":
        shard = local(tensor).detach()
        if isinstance(slot, _Copy) and _alike(slot.shard, shard):
            copied = slot.shard.copy_(shard)
        else:
            copied = shard.to(shard.device if self._device == "same" else self._device, copy=True)
        if not isinstance(tensor, DTensor):
            return _Copy(copied, shard.device)
        spread = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
        return _Copy(copied, shard.device, {**spread, "shape": tensor.shape, "stride": tensor.stride()})


def forget_gathered(model: nn.Module) -> None:
    """Makes FSDP gather changed weights again; it keeps those of the root after a forward pass alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = module._handle
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(True)


class _Copy(NamedTuple):
    shard: Tensor
    device: torch.device
    spread: Mapping[str, Any] | None = None

    def new(self) -> Tensor:
        shard = self.shard.to(self.device, copy=True)
        return shard if self.spread is None else DTensor.from_local(shard, run_check=False, **self.spread)


def _put_back(kept: Any, value: Any) -> Any:
    if isinstance(kept, _Copy):
        if not isinstance(value, Tensor) or not _alike(local(value), kept.shard):
            return kept.new()
        local(value).copy_(kept.shard)
        return value
    if isinstance(kept, dict):
        target = value if isinstance(value, dict) else {}
        for key in list(target.keys() - kept.keys()):
            del target[key]
        target.update({key: _put_back(item, target.get(key)) for key, item in kept.items()})
        return target
    if isinstance(kept, list):
        values = value if isinstance(value, list) and len(value) == len(kept) else [None] * len(kept)
        return [_put_back(item, old) for item, old in zip(kept, values, strict=True)]
    return deepcopy(kept)


def _alike(a: Tensor, b: Tensor) -> bool:
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
