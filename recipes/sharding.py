"""Distributes a network of ``transformers``: tensor parallelism and FSDP2."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def spread(model: Any, mesh: DeviceMesh, gather_dtype: torch.dtype | None = None, **kwargs: Any) -> None:
    """Makes the linear layers tensor-parallel as the network's configuration says, then shards parameters, in place.

    Args:
        model: of ``transformers``.
        mesh: with dimensions ``"data_parallel"`` and ``"tensor_parallel"``, as ``ModelParallelStrategy`` creates it. A
            dimension of size 1 changes nothing.
        gather_dtype: the dtype that parameters are gathered in; None for their own. Gradients are reduced in float32.
        **kwargs: passed to ``fully_shard``.

    Raises:
        ValueError: ``gather_dtype`` is given, but parameters are not sharded; or the network has no known
            tensor-parallel plan, or its heads do not divide by the number of tensor-parallel processes.
    """
    data, tensors = mesh["data_parallel"], mesh["tensor_parallel"]
    if gather_dtype is not None and data.size() == 1:
        raise ValueError(
            f"Nothing is gathered in {gather_dtype} with a data_parallel_size of 1: leave gather_dtype out, or set "
            "data_parallel_size of ModelParallelStrategy to the number of devices, and tensor_parallel_size to 1."
        )
    if tensors.size() > 1:
        parallelize_module(model, tensors, tensor_parallel_plan(model, tensors.size()))
    if data.size() > 1:
        if gather_dtype is not None:
            kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=torch.float32)
        for part in (*blocks(model), model):
            fully_shard(part, mesh=data, **kwargs)


def blocks(model: Any) -> list[nn.Module]:
    """Returns the decoder blocks of a network; FSDP2 gathers the parameters of each together."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def tensor_parallel_plan(model: Any, size: int) -> dict[str, ParallelStyle]:
    """Chooses the style of each linear layer over ``size`` processes, by patterns of names; raises as `spread`."""
    config, advice = model.config, "Train it with tensor_parallel_size=1."
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"{type(model).__name__} does not say how to cut its layers over {size} processes. {advice}")
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    if unknown:
        raise ValueError(f"{type(model).__name__} has layers to be cut as {', '.join(unknown)}: not known. {advice}")
    heads = {name: getattr(config, name, size) for name in ("num_attention_heads", "num_key_value_heads")}
    for name, count in heads.items():
        if count % size:
            raise ValueError(f"{name} is {count}, which {size} processes cannot share evenly. {advice}")
    prefix = f"{model.base_model_prefix}."
    return {f"{prefix}{pattern}": _STYLES[style]() for pattern, style in plan.items()}
