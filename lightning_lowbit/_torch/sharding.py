"""The part of the doorway to torch's private names that knows process groups, DTensor and FSDP1."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def process_group(name: Any) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    return _resolve_process_group(name)


# --- DTensor ----------------------------------------------------------------------------------------------------------


def offset_of_shard(parameter: Any) -> tuple[int, ...]:
    """Returns where this process's shard of a DTensor begins, by dimension."""
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(offset)


def local_tensor(parameter: Any) -> Tensor:
    """Returns the shard of a DTensor that this process holds, and not a view of it."""
    shard: Tensor = parameter._local_tensor
    return shard


# --- DDP --------------------------------------------------------------------------------------------------------------


def averages_gradients(module: Any) -> bool:
    """Tells whether a module of DDP averages gradients over all ranks: a registered hook need not, and within ``Join``
    some ranks have ended."""
    return not module._comm_hooks and not module._join_config.enable


# --- FSDP1 ------------------------------------------------------------------------------------------------------------


def is_flattened(parameter: Tensor) -> bool:
    """Tells whether FSDP1 keeps a parameter in a flat buffer."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def is_flat_buffer(parameter: Tensor) -> bool:
    """Tells whether a parameter is a flat buffer of FSDP1."""
    return bool(getattr(parameter, "_is_flat_param", False))


def flat_handle(module: Any) -> Any:
    """Returns FSDP1's record of a wrapped module's flat buffer; None without parameters."""
    return module._handle


def flat_parameters(handle: Any) -> list[tuple[Tensor, torch.Size]]:
    """Returns the parameters in a flat buffer and their whole shapes; none with ``use_orig_params=False``."""
    if handle is None or not handle._use_orig_params:
        return []
    flat = handle.flat_param
    return list(zip(flat._params or (), map(torch.Size, flat._shapes), strict=True))


def remembered_class(cls: Any, sharded: Any) -> Any:
    """Returns FSDP2's class for sharded modules of a class; ``sharded`` becomes that class if FSDP2 knows none."""
    from torch.distributed.fsdp._fully_shard._fully_shard import get_cls_to_fsdp_cls

    return get_cls_to_fsdp_cls().setdefault(cls, sharded)
