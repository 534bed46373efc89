"""The part of the doorway to torch's private names that knows the records of FSDP2.

Only code for weights that are gathered in few bits imports it: should a new torch move these parts, the rest works.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

Record = FSDPParam  # of a parameter


def weights_of(module: Any) -> Iterator[FSDPParam]:
    """Yields the record of each parameter ``weight`` that a module gathers whole, for both of its passes.

    FSDP2 does not call extensions for parameters that it spreads over a smaller mesh after the forward pass.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:  # torch 2.11 has one, or None
        if group is not None and not group._use_post_forward_mesh:
            yield from (record for record in group.fsdp_params if record._module_info.param_name == "weight")


def owner_of(record: FSDPParam) -> Any:
    return record._module_info.module


def is_shared(record: FSDPParam) -> bool:
    """Tells whether several modules own the parameter of a record."""
    return bool(record._module_info.shared_modules)


def is_cut_by_rows(record: FSDPParam) -> bool:
    """Tells whether FSDP2 alone has cut a parameter, along its first dimension."""
    return not record.is_dtensor and isinstance(record.mesh_info, FSDPMeshInfo) and record.fsdp_placement.dim == 0


def shard_data(record: FSDPParam) -> Tensor:
    """Returns the shard of a record, padded to the size that all processes have, 1-D."""
    return record._sharded_param_data


def whole_size(record: FSDPParam) -> torch.Size:
    """Returns the shape of the parameter before FSDP2 cut it."""
    return record._orig_size


class ExtendedRecord(FSDPParam):
    """FSDP2's record of a parameter that an extension gathers, instead of FSDP2 from the local tensor.

    Attributes:
        extension: an object with the methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.
    """

    extension: Any

    @property
    def _sharded_local_tensor(self) -> Any:
        return self.extension

    def _init_extensions(self) -> None:
        """FSDP2 calls this again when training starts; the buffers of the gathered parameter stay."""
        buffers = self._unsharded_inner_tensors
        super()._init_extensions()
        self._unsharded_inner_tensors = buffers

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that hold the gathered parameter."""
        return self._unsharded_inner_tensors

    @buffers.setter
    def buffers(self, tensors: list[Tensor]) -> None:
        self._unsharded_inner_tensors = tensors

    def release(self) -> None:
        """Gives the parameter back to FSDP2."""
        self.__class__ = FSDPParam  # type: ignore[assignment]
        self.all_gather_outputs, self._unsharded_inner_tensors = self._unsharded_inner_tensors, []
        del self.extension


def extend(record: Any, extension: Any) -> ExtendedRecord:
    """Has an extension gather the parameter of a record, in place; returns the record. See :class:`ExtendedRecord`.

    The buffers stay FSDP2's own: an optimizer or a graph may know the parameter.
    """
    buffers = record._unsharded_inner_tensors or record.all_gather_outputs
    record.__class__ = ExtendedRecord
    record.extension = extension
    record._init_extensions()
    record._unsharded_inner_tensors, record.all_gather_outputs = buffers, []
    extended: ExtendedRecord = record
    return extended
