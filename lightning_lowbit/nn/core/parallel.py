"""Tensor parallelism: a layer whose weight is a DTensor, of which each process multiplies its shard.

weight sharded along        x            w            g, and Y        Y of each process         dX of each process
out_features (column)       whole        rows         columns         its columns               a term of the sum
in_features (row)           columns      columns      whole           a term of the sum         its columns
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor import Shard as Cut

from lightning_lowbit.quant.shard import Shard


class Shards(NamedTuple):
    """The shards of a layer's ``x`` [tokens, in], ``w`` [out, in] and ``g`` [tokens, out]; None for a whole matrix."""

    x: Shard | None = None
    w: Shard | None = None
    g: Shard | None = None


WHOLE = Shards()


# Not compiled: from a second number of tokens on, Inductor of torch 2.13 leaves the sum over processes out of the
# gradient of x.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def tensor_parallel(
    multiply: Callable[[Tensor, Tensor, Tensor | None, Shards], Tensor], x: Tensor, weight: DTensor, bias: Any
) -> DTensor:
    """Multiplies by a weight that is a DTensor; ``multiply`` gives x · Wᵀ + b of shards.

    ``x`` is a DTensor over the weight's mesh, redistributed where needed. The weight, ``[out_features, in_features]``,
    is whole or sharded over one dimension of its mesh. The output is sharded along the features if the weight is, and a
    pending sum (``Partial``) if the weight is sharded along ``in_features``. Another input or sharding is a
    ``ValueError``.
    """
    mesh = weight.device_mesh
    if not isinstance(x, DTensor):
        raise ValueError(
            f"The weight of a layer is spread over {mesh}, and its input is a plain tensor. If fully_shard has spread "
            "it, call the module that was given to fully_shard, which gathers weights. If it is to be tensor-parallel, "
            "use ColwiseParallel or RowwiseParallel, which make DTensors of inputs."
        )
    cut = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    along = {dim: p.dim for dim, p in enumerate(weight.placements) if type(p) is Cut}
    if len(cut) > 1 or cut != [*along]:
        raise ValueError(
            f"A quantized layer needs a weight that is cut along one dimension of its mesh; got {weight.placements} "
            f"over {mesh}. Shard it with fully_shard, or with ColwiseParallel or RowwiseParallel."
        )
    mesh_dim, rows_or_columns = next(iter(along.items()), (None, None))
    is_cut_by_columns, last = rows_or_columns == 1, x.dim() - 1

    def placed(placement: Placement) -> list[Placement]:
        return [placement if dim == mesh_dim else Replicate() for dim in range(mesh.ndim)]

    local = x.redistribute(mesh, placed(Cut(last) if is_cut_by_columns else Replicate()))
    local_bias = None if bias is None or is_cut_by_columns else _local(bias, bias.placements)
    y = multiply(
        _local(local, placed(Cut(last) if is_cut_by_columns else Partial())),
        _local(weight, weight.placements),
        local_bias,
        WHOLE if mesh_dim is None else _shards(weight, mesh_dim),
    )
    shape = torch.Size((*x.shape[:-1], len(weight)))
    placements = placed(Partial() if is_cut_by_columns else Cut(last))
    stride = torch.empty(shape, device="meta").stride()
    spread = DTensor.from_local(y, mesh, placements, run_check=False, shape=shape, stride=stride)
    # Only one term of the pending sum may have the bias; DTensor sees to that.
    return spread if bias is None or not is_cut_by_columns else spread + bias.to(y.dtype)


def _local(spread: DTensor, placements: Sequence[Placement]) -> Tensor:
    """Returns this process's shard, whose gradient has the placements."""
    shard: Tensor = _Local.apply(spread, placements)  # type: ignore[no-untyped-call]
    return shard


class _Local(torch.autograd.Function):
    """``DTensor.to_local``, also for shards of different sizes."""

    # It takes the strides of a gradient from the shard, so that they differ among processes. Where gradients are
    # accumulated, torch 2.11 then gathers those whose strides are not the weight's: only some processes take part, and
    # wait for the others.

    @staticmethod
    def forward(ctx: Any, spread: DTensor, placements: Sequence[Placement]) -> Tensor:
        ctx.mesh, ctx.placements, ctx.whole = spread.device_mesh, placements, (spread.shape, spread.stride())
        ctx.set_materialize_grads(False)
        shard = spread.to_local()
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[DTensor | None, None]:
        if g is None:
            return None, None
        shape, stride = ctx.whole
        return DTensor.from_local(g, ctx.mesh, ctx.placements, run_check=False, shape=shape, stride=stride), None


def _shards(weight: DTensor, mesh_dim: int) -> Shards:
    mesh, placement = weight.device_mesh, weight.placements[mesh_dim]
    assert isinstance(placement, Cut)
    dim, size = placement.dim, weight.shape[placement.dim]
    step = -(-size // mesh.size(mesh_dim))  # as torch.chunk cuts
    start = min(mesh.get_local_rank(mesh_dim) * step, size)
    weight_shard = Shard(mesh.get_group(mesh_dim).group_name, dim, start, step, size)
    token_shard = weight_shard._replace(dim=1)
    return Shards(w=weight_shard, g=token_shard) if dim == 0 else Shards(x=token_shard, w=weight_shard)
