"""Parameters that are spread over processes: what of them is here, and who holds the rest.

An optimizer that looks at whole matrices (their largest gradient, their norm) needs both. Three ways to spread a
parameter are known, everything else is whole:

    DTensor      FSDP2 and tensor parallelism: the tensor knows its mesh; the elements are spread along each mesh
                 dimension on which it is not replicated
    FSDP1        with the original parameters, each of which is the part of a flat buffer that lies on this rank: 1-D,
                 perhaps empty, without a gradient where it is empty. Only the wrapped module knows the process group,
                 so it has to be shown once (`connect`); LowBitPrecision does so
    DeepSpeed    ZeRO hands an optimizer flat buffers in which no matrix can be told from another: refused

What is measured on the parts becomes that of the wholes by one collective per process group, whatever the number of
parameters (`all_reduce_`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.weak import WeakIdKeyDictionary

from lightning_lowbit.quant.shard import amax_of


class Sharding(NamedTuple):
    """How a parameter is spread.

    Attributes:
        shape: of the whole parameter.
        groups: the process groups over which its elements are spread, none for a whole one.
        is_flat: the local part is a stretch of the flattened parameter (FSDP1).
    """

    shape: torch.Size
    groups: tuple[dist.ProcessGroup, ...] = ()
    is_flat: bool = False


_FLATTENED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters of FSDP1: how they are spread


def connect(module: nn.Module) -> None:
    """Tells the optimizers of this package how FSDP1 has spread the parameters of a module.

    `LowBitPrecision` calls it. Without that plugin, call it once after wrapping. Modules without FSDP1 have no need.

    Args:
        module: the root that `FullyShardedDataParallel` wrapped.
    """
    for part in FullyShardedDataParallel.fsdp_modules(module):
        handle = part._handle
        if handle is None or not handle._use_orig_params:
            continue
        flat, group = handle.flat_param, part.process_group
        groups = (group,) if group is not None and group.size() > 1 and handle.uses_sharded_strategy else ()
        for parameter, shape in zip(flat._params or (), flat._shapes, strict=True):
            _FLATTENED[parameter] = Sharding(torch.Size(shape), groups, bool(groups))


def sharding_of(parameter: Tensor) -> Sharding:
    """How a parameter is spread.

    Raises:
        ValueError: FSDP1 has spread it in a way that is not known.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        spread = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
        groups: Any = tuple(mesh.get_group(dim) for dim in spread if mesh.size(dim) > 1)
        return Sharding(parameter.shape, groups)
    if getattr(parameter, "_is_flat_param", False):
        raise ValueError(
            f"A parameter of {tuple(parameter.shape)} is a flat buffer of FSDP1, in which no matrix can be told from "
            "another. Wrap with FullyShardedDataParallel(..., use_orig_params=True), as FSDPStrategy does by default."
        )
    if not getattr(parameter, "_fsdp_flattened", False):
        return Sharding(parameter.shape)
    if parameter not in _FLATTENED:
        raise ValueError(
            f"A parameter of {tuple(parameter.shape)} belongs to FSDP1, and only the wrapped module knows how it is "
            "spread. Use a LowBitPrecision plugin, or call lightning_lowbit.optim.connect(fsdp_module) before the "
            "first step; or use ModelParallelStrategy (FSDP2)."
        )
    known: Sharding = _FLATTENED[parameter]
    return known


def offsets_of(parameter: Tensor) -> tuple[int, ...]:
    """Where, in each dimension, the local part of a parameter begins in the whole; zeros for a whole one."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(offset)


def local(tensor: Tensor) -> Tensor:
    """The part that lies on this rank; changing it changes the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor, gradient: Tensor | None = None) -> Tensor | None:
    """The part of a parameter's gradient that belongs to the part of the parameter on this rank.

    Args:
        parameter: whose gradient it is.
        gradient: another one than ``parameter.grad``, spread in any way over the same mesh.

    Returns:
        A plain tensor; None where there is no gradient.
    """
    gradient = parameter.grad if gradient is None else gradient
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:  # a sum that is still to be made, as with sequence parallelism
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        return gradient.to_local()
    return gradient


def local_norms(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Norms of gradients, of their parts on this rank; squares of them add up over ranks (`all_reduce_`).

    Args:
        parameters: P of them.
        device: of the result.

    Returns:
        L2 norms, float32 ``[P]``, 0 where there is no gradient.
    """
    parts = [local_gradient(parameter) for parameter in parameters]
    dense = [part.coalesce().values() if part.is_sparse else part for part in parts if part is not None]
    # torch takes norms in a wider dtype than the tensor's, not in a narrower one.
    narrow = [part.float() if part.dtype == torch.float64 else part for part in dense]
    norms = iter(torch._foreach_norm(narrow, 2, torch.float32) if narrow else ())
    none = torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack([none, *(none if part is None else next(norms).to(none) for part in parts)])[1:]


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """L2 norm of all gradients together, of the whole parameters, however each of them is spread.

    Args:
        parameters: of a model, the same on all ranks: they meet in one collective per process group.

    Returns:
        float32, 0-d, the same on all ranks; 0 where there is no gradient.

    Raises:
        ValueError: as :func:`sharding_of`.
    """
    device = next((local(parameter).device for parameter in parameters), torch.device("cpu"))
    squares = local_norms(parameters, device).square().unbind()
    groups = [sharding_of(parameter).groups for parameter in parameters]
    whole = all_reduce_(squares, groups, dist.ReduceOp.SUM)
    return torch.stack(whole).sum().sqrt() if whole else torch.zeros((), device=device)


@torch.no_grad()
def clip_gradient_norm_(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Scales all gradients, in place, so that their norm together is at most ``limit``.

    As ``torch.nn.utils.clip_grad_norm_``, which takes parameters of one mesh alone.

    Returns:
        The norm before it, as :func:`gradient_norm`.
    """
    norm = gradient_norm(parameters)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor.to(local(parameter.grad).dtype))
    return norm


@torch.no_grad()
def largest_magnitudes(parameters: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The largest magnitude of each whole parameter, however it is spread.

    Args:
        parameters: the same on all ranks: they meet in one collective per process group.
        device: of the processes, also where parts of parameters are offloaded to the CPU.

    Returns:
        float32, 0-d, on the device; infinite where it holds a NaN, which collectives may lose.

    Raises:
        ValueError: as :func:`sharding_of`.
    """
    own = [amax_of(local(parameter)).to(device).nan_to_num(nan=torch.inf, posinf=torch.inf) for parameter in parameters]
    return all_reduce_(own, [sharding_of(parameter).groups for parameter in parameters], dist.ReduceOp.MAX)


def zeros_spread_as(parameter: Tensor, last: Callable[[int], int], dtype: torch.dtype) -> Tensor:
    """Zeros for what is kept along with a parameter, row by row, in rows of another length.

    Args:
        parameter: of one dimension or more.
        last: length of a row of n elements; where rows are cut, it is asked for each part.
        dtype: of the zeros.

    Raises:
        ValueError: the parts of all ranks do not make up a tensor that is spread as the parameter is.
    """
    part = local(parameter)
    shape = (*part.shape[:-1], last(part.shape[-1]))
    zeros = torch.zeros(shape, dtype=dtype, device=part.device)
    if not isinstance(parameter, DTensor):
        return zeros
    mesh, placements = parameter.device_mesh, parameter.placements
    lengths = [last(length) for length in _cut_rows(parameter, parameter.shape[-1])]
    # As seen from any rank: one that went on would wait for the others.
    if lengths != _cut_rows(parameter, sum(lengths)):
        raise ValueError(
            f"A parameter of {tuple(parameter.shape)}, spread as {placements} over {mesh.size()} ranks, leaves "
            f"{tuple(part.shape)} here, for which rows of another length cannot be kept: use moments='fp32' for it."
        )
    whole = torch.Size((*parameter.shape[:-1], sum(lengths)))
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(zeros, mesh, placements, run_check=False, shape=whole, stride=stride)


def _cut_rows(parameter: DTensor, length: int) -> list[int]:
    """The parts of a row of some length, cut as the rows of a parameter are."""
    parts = [length]
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard(parameter.dim() - 1):
            parts = [cut for part in parts for cut in _chunks(part, parameter.device_mesh.size(dim))]
    return parts


def _chunks(length: int, parts: int) -> list[int]:
    size = -(-length // parts)
    return [max(0, min(size, length - size * index)) for index in range(parts)]


def all_reduce_world_(value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduces a tensor over all processes, in place, where there are several."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, op)


def all_reduce_(
    values: Sequence[Tensor], groups: Sequence[tuple[dist.ProcessGroup, ...]], op: dist.ReduceOp.RedOpType
) -> list[Tensor]:
    """Reduces each tensor over its process groups, all tensors of a group in one collective.

    Args:
        values: floating, any shapes, the same on all ranks of a group.
        groups: of each tensor; one without any is left alone.
        op: how.

    Returns:
        The reduced tensors.
    """
    reduced = list(values)
    for group in dict.fromkeys(group for of_one in groups for group in of_one):
        members = [index for index, of_one in enumerate(groups) if group in of_one]
        device = reduced[members[0]].device
        packed = torch.cat([reduced[index].flatten().to(device) for index in members])
        dist.all_reduce(packed, op, group)
        parts = torch.split(packed, [reduced[index].numel() for index in members])
        for index, part in zip(members, parts, strict=True):
            reduced[index] = part.view_as(reduced[index]).to(reduced[index])
    return reduced
