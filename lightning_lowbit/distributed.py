"""Sharded parameters: the shard on this rank, and the process groups that hold the rest.

DTensor      FSDP2 and tensor parallelism: the tensor knows its mesh
FSDP1        with the original parameters: stretches of a flat buffer, known to the wrapped module (`connect`)
DDP          nothing is sharded; the wrapped module knows the ranks with the same gradients (`connect`)
DeepSpeed    ZeRO's flat buffers, in which matrices cannot be told apart: refused
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from lightning_lowbit._torch import foreach_norm
from lightning_lowbit._torch.sharding import (
    averages_gradients,
    flat_handle,
    flat_parameters,
    is_flat_buffer,
    is_flattened,
    offset_of_shard,
)
from lightning_lowbit.quant.shard import amax_of


class Sharding(NamedTuple):
    """The shape of a whole tensor, the process groups that share it, and whether a shard is flat (FSDP1)."""

    shape: torch.Size
    groups: tuple[dist.ProcessGroup, ...] = ()
    is_flat: bool = False


_FLATTENED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters of FSDP1: their `Sharding`
_REPLICATED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters of DDP: a weak reference to its module


def connect(module: nn.Module) -> None:
    """Tells the optimizers how FSDP1 has sharded a root module, or that DDP replicates it; call it after wrapping, as
    `LowBitPrecision` does."""
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            named = part.module.named_parameters()
            _REPLICATED.update({p: ref(part) for name, p in named if name not in part.parameters_to_ignore})
    for part in FullyShardedDataParallel.fsdp_modules(module):
        if (handle := flat_handle(part)) is None:
            continue
        group = part.process_group
        groups = (group,) if group is not None and group.size() > 1 and handle.uses_sharded_strategy else ()
        for parameter, shape in flat_parameters(handle):
            _FLATTENED[parameter] = Sharding(shape, groups, bool(groups))


def sharding_of(parameter: Tensor) -> Sharding:
    """Returns how a parameter is sharded; a ``ValueError`` if only FSDP1's wrapped module knows."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        sharded = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
        groups: Any = tuple(mesh.get_group(dim) for dim in sharded if mesh.size(dim) > 1)
        return Sharding(parameter.shape, groups)
    shape = tuple(parameter.shape)
    if is_flat_buffer(parameter):
        raise ValueError(
            f"A parameter of {shape} is a flat buffer of FSDP1, in which no matrix can be told from another. Wrap with "
            "FullyShardedDataParallel(..., use_orig_params=True), as FSDPStrategy does by default."
        )
    if not is_flattened(parameter):
        return Sharding(parameter.shape)
    if parameter not in _FLATTENED:
        raise ValueError(
            f"A parameter of {shape} belongs to FSDP1, and only the wrapped module knows how it is spread. Use a "
            "LowBitPrecision plugin, or call lightning_lowbit.optim.connect(fsdp_module) before the first step."
        )
    return _FLATTENED[parameter]


def whole_shape(parameter: Tensor) -> torch.Size:
    """Returns the shape of a whole parameter, also of one that FSDP1 has flattened and :func:`connect` knows."""
    return _FLATTENED[parameter].shape if parameter in _FLATTENED else parameter.shape


def replicas_of(parameters: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """Returns the ranks that have all of some parameters, with the same gradients; None if they are not known."""
    modules = [_REPLICATED[parameter]() if parameter in _REPLICATED else None for parameter in parameters]
    module = modules[0]
    if module is None or any(other is not module for other in modules):
        return None
    is_synced = averages_gradients(module) and module.require_backward_grad_sync  # which is False within no_sync
    return module.process_group if is_synced else None


def offsets_of(parameter: Tensor) -> tuple[int, ...]:
    return offset_of_shard(parameter) if isinstance(parameter, DTensor) else (0,) * parameter.dim()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor, gradient: Tensor | None = None) -> Tensor | None:
    """Returns the gradient (or ``parameter.grad``) of the shard on this rank as a plain tensor; None without one."""
    gradient = parameter.grad if gradient is None else gradient
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:  # a sum that is still to be taken, as with sequence parallelism
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        return gradient.to_local()
    return gradient


def local_norms(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns L2 norms of the shards' gradients, float32 ``[P]``, 0 without one; their squares add up over ranks."""
    shards = [local_gradient(parameter) for parameter in parameters]
    dense = [shard.coalesce().values() if shard.is_sparse else shard for shard in shards if shard is not None]
    # torch takes norms in a wider dtype than the tensor's, not in a narrower one.
    real = [torch.view_as_real(shard) if shard.is_complex() else shard for shard in dense]
    narrow = [shard.float() if shard.dtype == torch.float64 else shard for shard in real]
    norms = iter(foreach_norm(narrow, 2, torch.float32) if narrow else ())
    none = torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack([none, *(none if shard is None else next(norms).to(none) for shard in shards)])[1:]


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm of all gradients of whole parameters, the same on all ranks: float32, 0-d."""
    device = next((local(parameter).device for parameter in parameters), torch.device("cpu"))
    squares = local_norms(parameters, device).square().unbind()
    groups = [sharding_of(parameter).groups for parameter in parameters]
    whole = all_reduce_(squares, groups, dist.ReduceOp.SUM)
    return torch.stack(whole).sum().sqrt() if whole else torch.zeros((), device=device)


def sharded_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, which has the shape of a parameter and is sharded as it is."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def gathered(parameter: Tensor, part: Tensor) -> Tensor:
    """Returns the whole tensor of which each rank has a part, sharded as a parameter is: a collective."""
    tensor = sharded_like(parameter, part)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """Returns this rank's part of a whole tensor, to be sharded as a parameter is; without a collective."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, parameter.placements).to_local()


def is_sharded(model: nn.Module) -> bool:
    is_wrapped = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return is_wrapped or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def forget_gathered(model: nn.Module) -> None:
    """Gives modules of FSDP their shards back, and makes it gather weights again: after a forward pass without a
    backward pass it keeps the gathered weights of the root, which then stand among ``model.parameters()``."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = flat_handle(module)
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(True)


@torch.no_grad()
def clip_gradients_(parameters: Sequence[Tensor], limit: float, root: nn.Module | None, is_sharded: bool) -> None:
    """Scales all gradients, also of several meshes, in place to a common norm of at most ``limit``.

    Args:
        parameters: the parameters with gradients.
        limit: the largest norm.
        root: the wrapped model, for FSDP1.
        is_sharded: True if ranks hold parts of the parameters.
    """
    if isinstance(root, FullyShardedDataParallel) and any(map(is_flat_buffer, parameters)):
        root.clip_grad_norm_(limit)
    elif is_sharded:
        factor = (limit / (gradient_norm(parameters) + 1e-6)).clamp(max=1.0)
        for gradient in (local(parameter.grad) for parameter in parameters if parameter.grad is not None):
            gradient.mul_(factor.to(gradient.dtype))
    else:
        torch.nn.utils.clip_grad_norm_(parameters, limit)


@torch.no_grad()
def clip_values_(parameters: Sequence[Tensor], limit: float) -> None:
    """Limits each element of all gradients, also of several meshes, in place to at most ``limit`` in size."""
    for parameter in parameters:
        if (shard := local_gradient(parameter)) is not None:
            parameter.grad = sharded_like(parameter, shard.clamp_(-limit, limit))


@torch.no_grad()
def parameter_amaxes(parameters: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns max|p| of each whole parameter, the same on all ranks: float32, 0-d, infinite with a NaN."""
    amaxes = [
        amax_of(local(parameter)).to(device).nan_to_num(nan=torch.inf, posinf=torch.inf) for parameter in parameters
    ]
    return all_reduce_(amaxes, [sharding_of(parameter).groups for parameter in parameters], dist.ReduceOp.MAX)


def zeros_sharded_as(parameter: Tensor, last: Callable[[int], int], dtype: torch.dtype) -> Tensor:
    """Returns zeros, sharded as a parameter, with ``last(n)`` elements for n of a row; or raises ``ValueError``."""
    shard = local(parameter)
    shape = (*shard.shape[:-1], last(shard.shape[-1]))
    zeros = torch.zeros(shape, dtype=dtype, device=shard.device)
    if not isinstance(parameter, DTensor):
        return zeros
    mesh, placements = parameter.device_mesh, parameter.placements
    lengths = [last(length) for length in _cut_rows(parameter, parameter.shape[-1])]
    # All ranks decide alike: one that continued alone would wait for the others.
    if lengths != _cut_rows(parameter, sum(lengths)):
        raise ValueError(
            f"A parameter of {tuple(parameter.shape)}, sharded as {placements} over {mesh.size()} ranks, leaves "
            f"{tuple(shard.shape)} here, for which rows of another length cannot be kept: use moments='fp32' for it."
        )
    whole = torch.Size((*parameter.shape[:-1], sum(lengths)))
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(zeros, mesh, placements, run_check=False, shape=whole, stride=stride)


def _cut_rows(parameter: DTensor, length: int) -> list[int]:
    parts = [length]
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard(parameter.dim() - 1):
            ranks = parameter.device_mesh.size(dim)
            sizes = [(part, -(-part // ranks)) for part in parts]
            parts = [max(0, min(size, part - size * rank)) for part, size in sizes for rank in range(ranks)]
    return parts


def all_reduce_world_(value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, op)


def all_reduce_(
    values: Sequence[Tensor], groups: Sequence[tuple[dist.ProcessGroup, ...]], op: dist.ReduceOp.RedOpType
) -> list[Tensor]:
    """Reduces each tensor over its process groups (if any), with one collective per group.

    ``values`` are floating, of any shapes, the same on all ranks of a group; ``groups`` has one entry for each.
    """
    reduced = list(values)
    for group in dict.fromkeys(chain.from_iterable(groups)):
        members = [index for index, its_groups in enumerate(groups) if group in its_groups]
        device = reduced[members[0]].device
        packed = torch.cat([reduced[index].flatten().to(device) for index in members])
        dist.all_reduce(packed, op, group)
        parts = torch.split(packed, [reduced[index].numel() for index in members])
        for index, part in zip(members, parts, strict=True):
            reduced[index] = part.view_as(reduced[index]).to(reduced[index])
    return reduced
