"""Copies of the training state (of local shards), restored in place: DDP and compiled steps refer to its tensors."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowbit._lightning import Trainer
from lightning_lowbit.distributed import local
from lightning_lowbit.optim import Adaptive

# Optimizer options that schedules and switches set. All others are the optimizer's state, such as Prodigy's estimate of
# the learning rate.
_SCHEDULED = {"params", "lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "initial_weight_decay"}
_SCHEDULED |= {"betas", "momentum", "base_momentum", "max_momentum"}


class TrainingState(NamedTuple):
    """Weights, optimizers, others with the same state on all ranks; buffers and :func:`copies_of_weights`, by place."""

    weights: Sequence[Tensor]  # more may join later, at the end
    optimizers: Sequence[torch.optim.Optimizer]
    others: Sequence[Any]
    copies: Mapping[str, Sequence[Tensor]]


class Snapshot:
    """A reusable copy on ``device`` (``"same"``: the original's), after ``step`` steps (None without one)."""

    def __init__(self, device: str = "same") -> None:
        self.step: int | None = None
        self._device = device
        self._saved: list[Any] = [None] * 5

    @torch.no_grad()
    def take(self, step: int, trained: TrainingState) -> None:
        groups = [group for optimizer in trained.optimizers for group in optimizer.param_groups]
        state = [
            list(trained.weights),
            _states(trained.optimizers),
            [{name: value for name, value in group.items() if name not in _SCHEDULED} for group in groups],
            [other.state_dict() for other in trained.others],
            {place: list(tensors) for place, tensors in trained.copies.items()},
        ]
        self._saved, self.step = self._copy(state, self._saved), step

    @torch.no_grad()
    def add(self, trained: TrainingState) -> None:
        """Adds weights, buffers and copies that have joined since, as they are now: there are no earlier ones."""
        if self.step is None:
            return
        weights, *_, copies = self._saved
        weights += self._copy(list(trained.weights[len(weights) :]), None)
        newcomers = {place: list(tensors) for place, tensors in trained.copies.items() if place not in copies}
        copies |= self._copy(newcomers, None)

    @torch.no_grad()
    def put_back(self, trained: TrainingState) -> list[str]:
        """Restores the training state; returns the places of copies that are not as when the snapshot was taken."""
        weights, states, options, others, copies = self._saved
        pairs = [*zip(trained.weights, weights, strict=True)]
        strange = []
        for place, tensors in trained.copies.items():
            copied = copies.get(place, ())
            if [local(tensor).shape for tensor in tensors] == [copy.shard.shape for copy in copied]:
                pairs += zip(tensors, copied, strict=True)
            else:
                strange.append(place)
        for weight, copy in pairs:
            local(weight).copy_(copy.shard)
        for saved, state in zip(states, _states(trained.optimizers), strict=True):
            _put_back(saved, state)
        groups = [group for optimizer in trained.optimizers for group in optimizer.param_groups]
        for group, saved in zip(groups, options, strict=False):  # groups may have been added since
            group.update({name: _put_back(value, group.get(name)) for name, value in saved.items()})
        for other, saved in zip(trained.others, others, strict=True):
            other.load_state_dict(_put_back(saved, None))
        return strange

    def _copy(self, value: Any, slot: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, slot)
        if isinstance(value, Mapping):
            slots = slot if isinstance(slot, Mapping) else {}
            return {key: self._copy(item, slots.get(key)) for key, item in value.items()}
        if isinstance(value, list):
            olds = slot if isinstance(slot, list) and len(slot) == len(value) else [None] * len(value)
            return [self._copy(item, old) for item, old in zip(value, olds, strict=True)]
        return deepcopy(value)

    def _copy_tensor(self, tensor: Tensor, slot: Any) -> "_Copy":
        shard = local(tensor).detach()
        if isinstance(slot, _Copy) and _alike(slot.shard, shard):
            copied = slot.shard.copy_(shard)
        else:
            copied = shard.to(shard.device if self._device == "same" else self._device, copy=True)
        if not isinstance(tensor, DTensor):
            return _Copy(copied, shard.device)
        spread = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
        return _Copy(copied, shard.device, {**spread, "shape": tensor.shape, "stride": tensor.stride()})


def copies_of_weights(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Finds copies of weights, such as averages or a teacher: tensors by the attribute that holds them.

    A copy is a module in an attribute of a callback or the LightningModule, also in a list, tuple or dict; or a list,
    tuple or dict of tensors with the shapes of all parameters, or of all trained ones. The model itself is no copy.

    Examples:
        >>> copies_of_weights(Trainer(callbacks=[EMAWeightAveraging()])).keys()
        dict_keys(['EMAWeightAveraging._average_model'])
    """
    model = trainer.lightning_module
    originals = {id(tensor) for tensor in chain(model.parameters(), model.buffers())}
    parameters = [*model.parameters()]
    shapes = [[p.shape for p in parameters], [p.shape for p in parameters if p.requires_grad]]
    copies: dict[str, list[Tensor]] = {}
    for holder in (model, *trainer.callbacks):  # type: ignore[attr-defined]
        for name, value in vars(holder).items():
            if tensors := [tensor for tensor in _tensors(value, shapes) if id(tensor) not in originals]:
                place = f"{type(holder).__name__}.{name}"
                copies.setdefault(place, []).extend(tensors)  # two callbacks may be of one class
    return copies


def _tensors(value: Any, shapes: Collection[list[torch.Size]]) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from chain(value.parameters(), value.buffers())
        return
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, list | tuple):  # others may read their items from a disk
        return
    if value and all(isinstance(item, Tensor) for item in value):
        yield from value if [item.shape for item in value] in shapes else ()
        return
    for item in value:
        if isinstance(item, nn.Module):
            yield from _tensors(item, shapes)


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Returns all states of optimizers, by parameter."""
    aside = [optimizer.set_aside for optimizer in optimizers if isinstance(optimizer, Adaptive)]
    return [*(optimizer.state for optimizer in optimizers), *aside]


class _Copy(NamedTuple):
    shard: Tensor
    device: torch.device
    spread: Mapping[str, Any] | None = None

    def new(self) -> Tensor:
        shard = self.shard.to(self.device, copy=True)
        return shard if self.spread is None else DTensor.from_local(shard, run_check=False, **self.spread)


def _put_back(saved: Any, value: Any) -> Any:
    if isinstance(saved, _Copy):
        if not isinstance(value, Tensor) or not _alike(local(value), saved.shard):
            return saved.new()
        local(value).copy_(saved.shard)
        return value
    if isinstance(saved, dict):
        target = value if isinstance(value, dict) else {}
        for key in list(target.keys() - saved.keys()):
            del target[key]
        target.update({key: _put_back(item, target.get(key)) for key, item in saved.items()})
        return target
    if isinstance(saved, list):
        values = value if isinstance(value, list) and len(value) == len(saved) else [None] * len(saved)
        return [_put_back(item, old) for item, old in zip(saved, values, strict=True)]
    return deepcopy(saved)


def _alike(a: Tensor, b: Tensor) -> bool:
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
