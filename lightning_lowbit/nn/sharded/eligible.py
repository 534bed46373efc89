"""Which weights FSDP2 can gather in few bits with the same results as in high precision.

Both GEMMs that read the weight must be able to use the operand of the forward pass. The weight must belong to a single
``nn.Linear``, only FSDP2 may shard it, along ``out_features``, and shards must end where tiles of its cast do.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lightning_lowbit.nn.casts.facts import by_reason, in_words, obstacle
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.layers.host import PRODUCTS
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.registry import quantized_class
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.operand import operand_dtype
from lightning_lowbit.quant.shard import ends_within

TAKES = {"activations", "no amax", "smooth tokens", "drawn", "delayed", "unpackable"}


@cache
def casts_obstacle(casts: LinearCasts) -> str | None:
    """Why weights with these casts must be gathered in high precision; None if they need not be."""
    return obstacle(casts, TAKES)


def records(model: nn.Module) -> Iterator[tuple[FSDPModule, FSDPParam]]:
    """FSDP2's record of each weight, with the module that gathers it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                # FSDP2 does not call the extension for parameters that are resharded to a smaller mesh.
                if not group._use_post_forward_mesh:
                    yield from ((module, p) for p in group.fsdp_params if p._module_info.param_name == "weight")


def is_plain(record: FSDPParam) -> bool:
    info = record._module_info
    layer = quantized_class(type(info.module))
    return (
        layer is not None
        and layer.kind == "linear"
        and layer.weight_matrix is QuantizedLayer.weight_matrix
        and not info.shared_modules
        and not record.is_dtensor
        and isinstance(record.mesh_info, FSDPMeshInfo)
        and record.fsdp_placement.dim == 0
    )


def gathered_dtype(record: FSDPParam) -> torch.dtype:
    return record.mp_policy.param_dtype or record.sharded_param.dtype


def misfit(record: FSDPParam, casts: LinearCasts, dtype: torch.dtype | None) -> str | None:
    """Why a weight is gathered in high precision although its casts would allow few bits; None if it is not."""
    gathered, (step, *_), cast = gathered_dtype(record), record.padded_sharded_param_size, casts.fprop_w
    assert isinstance(cast, Cast)
    if not is_plain(record):
        return "the weight is not one nn.Linear's alone, or not cut along its rows by FSDP2 alone"
    if isinstance(cast.scale.block, tuple) and ends_within(step, record._orig_size[0], cast.scale.block[0]):
        return f"shards of {step} rows end within a tile of {cast.scale.block[0]}"
    if gathered not in (torch.float32, operand_dtype(dtype or gathered, cast)):
        return f"FSDP2 gives the weight in {gathered}, which does not hold the operand"
    return None


def check_gathers(model: nn.Module, casts: Mapping[str, LinearCasts], dtype: torch.dtype | None) -> None:
    """Raises a ``ValueError`` if no weight of a model can be gathered in few bits with the casts by layer."""
    by_module = {id(record._module_info.module): record for _, record in records(model)}
    reasons: dict[str, str] = {}
    for name, layer_casts in casts.items():
        if PRODUCTS in name.split("."):
            reasons[name] = "the weight is one of several of its module, and gathered as usual"
        elif (record := by_module.get(id(model.get_submodule(name)))) is not None:
            reason = casts_obstacle(layer_casts) or misfit(record, layer_casts, dtype)
            if reason is None:
                return
            reasons[name] = reason
    if not reasons or not by_module:
        raise ValueError(
            "quantize_before_gather: FSDP2 shards no weight of a converted layer. It needs ModelParallelStrategy, and "
            "torch.distributed.fsdp.fully_shard in configure_model; leave it out with other strategies."
        )
    raise ValueError(
        f"quantize_before_gather: no weight can be gathered in few bits. {in_words(by_reason(reasons))}. Take casts "
        "whose dgrad uses the weight of fprop, some with overrides: 'nvfp4-nvidia', 'fp8-delayed', 'int4', any "
        "dgrad_w='fprop'."
    )
