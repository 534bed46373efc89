"""FSDP2 with cheap communication: weights are quantized on their shards, and codes and scales are gathered.

    shard [rows / n, columns]    in the dtype of the computation, as the layer would cast it
      quantize                   with scales and random bits of the whole (:mod:`lightning_lowbit.quant.shard`)
      all-gather                 uint8: 4.5 bits per element of NVFP4 instead of 16 or 32
      unpack                     the operand's values, in the dtype that FSDP2 gives the weight
    GEMMs                        use these values as the operand; gradients go straight through

Results equal those of emulated GEMMs of weights gathered in high precision, to the bit. So both GEMMs that read the
weight must use the operand of the forward pass, and shards must end where tiles of its cast do; other weights are
gathered as usual.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_lowbit._torch import unseen_writes, version_of
from lightning_lowbit._torch.fsdp2 import (
    ExtendedRecord,
    Record,
    extend,
    is_cut_by_rows,
    is_shared,
    owner_of,
    shard_data,
    weights_of,
    whole_size,
)
from lightning_lowbit._torch.sharding import local_tensor
from lightning_lowbit.nn.casts.facts import explain_groups, group_by_reason, obstacle
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.nn.core.operands import PrequantizedWeight
from lightning_lowbit.nn.core.watch import amax_in_force
from lightning_lowbit.nn.layers.composite import PARTS
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.nn.layers.registry import quantized_class
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.operand import operand_dtype
from lightning_lowbit.quant.packed import pack, unpack_
from lightning_lowbit.quant.scales import block_sum
from lightning_lowbit.quant.shard import Shard, amax_of, ends_within

_W = OPERANDS.index("fprop_w")

TAKES = {"activations", "no amax", "smooth tokens", "drawn", "delayed", "unpackable"}


@cache
def casts_obstacle(casts: LinearCasts) -> str | None:
    """Returns why weights with these casts must be gathered in high precision; None if they need not be."""
    return obstacle(casts, TAKES)


def records(model: nn.Module) -> Iterator[tuple[FSDPModule, Record]]:
    """Finds FSDP2's record of each weight, with the module that gathers it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from ((module, record) for record in weights_of(module))


def is_plain(record: Record) -> bool:
    """Returns whether a weight is a matrix of one linear layer, which FSDP2 alone shards, by rows."""
    cls = quantized_class(type(owner_of(record)))
    is_linear = cls is not None and cls.kind == "linear" and cls.matrix_of is QuantizedLayer.matrix_of
    return is_linear and is_cut_by_rows(record) and not is_shared(record)


def gathered_dtype(record: Record) -> torch.dtype:
    return record.mp_policy.param_dtype or record.sharded_param.dtype


def misfit(record: Record, casts: LinearCasts, dtype: torch.dtype | None) -> str | None:
    """Returns why a weight is gathered in high precision although its casts would allow few bits; None if it is not."""
    gathered, (step, *_), cast = gathered_dtype(record), record.padded_sharded_param_size, casts.fprop_w
    assert isinstance(cast, Cast)
    if not is_plain(record):
        return "the weight is not one nn.Linear's alone, or not cut along its rows by FSDP2 alone"
    if isinstance(cast.scale.block, tuple) and ends_within(step, whole_size(record)[0], cast.scale.block[0]):
        return f"shards of {step} rows end within a tile of {cast.scale.block[0]}"
    if gathered not in (torch.float32, operand_dtype(dtype or gathered, cast)):
        return f"FSDP2 gives the weight in {gathered}, which does not hold the operand"
    return None


def check_gathers(model: nn.Module, casts: Mapping[str, LinearCasts], dtype: torch.dtype | None) -> None:
    """Raises a ``ValueError`` if no weight of a model can be gathered in few bits with the casts by layer."""
    by_module = {id(owner_of(record)): record for _, record in records(model)}
    reasons: dict[str, str] = {}
    for name, layer_casts in casts.items():
        if PARTS in name.split("."):
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
    groups = explain_groups(group_by_reason(reasons))
    raise ValueError(
        f"quantize_before_gather: no weight can be gathered in few bits. {groups}. Take casts whose dgrad uses the "
        "weight of fprop, some with overrides: 'nvfp4-nvidia', 'fp8-delayed', 'int4', any dgrad_w='fprop'."
    )


class WeightGathers:
    """Makes FSDP2 gather the weights of a model's converted layers in few bits wherever results stay the same.

    Layers must be called: during a pass ``layer.weight`` holds the quantized elements, without the scale of the tensor.

    Args:
        model: converted, and sharded by ``fully_shard``.
        dtype: of autocast; None without it.
        casts: of the layers, by name, of which one must allow it (else a ``ValueError``); None for the layers' own.

    Examples:
        >>> gathers = WeightGathers(convert(sharded_model, "fp8-current"), torch.bfloat16)
        >>> for batch in batches:
        ...     gathers.prepare()
        ...     with torch.autocast("cuda", torch.bfloat16):
        ...         loss = sharded_model(batch)
        ...     loss.backward()
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None = None, casts: Mapping[str, LinearCasts] | None = None
    ) -> None:
        check_gathers(model, casts or {n: layer.full_casts for n, layer in quantized_layers(model).items()}, dtype)
        self._model = model
        self.release()
        self._gathers = [
            _Gather(self, record, module, dtype)
            for module, record in records(model)
            if isinstance(owner_of(record), QuantizedLayer) and is_plain(record)
        ]

    def release(self) -> None:
        """Gives the weights back to FSDP2, also those of former gathers."""
        for module, record in records(self._model):
            if isinstance(record, ExtendedRecord):
                module.reshard()
                record.extension.layer.lowbit.prequantized_weight = None
                record.release()

    def prepare(self) -> None:
        """Call before a forward pass: measures weights where casts need it, and reshards outdated ones."""
        self.measure()
        for gather in self._gathers:
            if gather.is_outdated:
                gather.module.reshard()

    def reshard(self) -> None:
        """Reshards after an inference-only forward pass, where FSDP2 keeps the root's weights gathered."""
        for gather in self._gathers:
            if gather.is_gathered and gather.gathered_with is not None:
                gather.module.reshard()

    def forget(self) -> None:
        """Drops the measurements of weights. Needed after changes by ``parameter.data``, which are not detected."""
        for gather in self._gathers:
            gather.measured = ()

    @torch.inference_mode(False)  # evaluation may come first, and training uses the same tensors
    @torch.no_grad()  # which the line above ends
    def measure(self) -> None:
        groups: dict[dist.ProcessGroup, list[_Gather]] = {}
        for gather in self._gathers:
            if gather.needs_statistic:
                groups.setdefault(gather.group, []).append(gather)
        for group, gathers in groups.items():
            # float64 holds an amax exactly, and a sum of magnitudes as `block_sum` does.
            local = torch.stack([gather.local_statistic() for gather in gathers])
            whole = local.new_empty(group.size() * len(local))
            collect = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name in torch 2.11
            collect(whole, local, group)
            whole = whole.view(-1, len(local))
            for gather, amax, total in zip(gathers, whole.amax(0).unbind(), whole.sum(0).unbind(), strict=True):
                gather.take(amax, total)


class _Gather:
    """Gathers one weight in few bits, and measures the statistics that its cast needs."""

    def __init__(self, gathers: WeightGathers, record: Record, module: FSDPModule, dtype: torch.dtype | None) -> None:
        self._gathers, self.module = gathers, module
        self.layer: Any = owner_of(record)
        self.group: dist.ProcessGroup = record.shard_mesh.get_group()
        self._shape = whole_size(record)
        self._dtype = dtype or gathered_dtype(record)
        step = record.padded_sharded_param_size[0]
        self._part = Shard(self.group.group_name, 0, self.group.rank() * step, step, self._shape[0])
        self.measured: tuple[Any, ...] = ()  # the state of the weight to which statistics belong
        self._amax: Tensor | None = None
        self._mean: Tensor | None = None
        self.gathered_with: Cast | None = None  # in the last gather
        module.reshard()
        # Loading and `module.to` replace the local tensor, where FSDP2 looks for an extension.
        self.record = extend(record, self)

    @property
    def _cast(self) -> Cast | None:
        """The cast in force for the next gather; None for high precision."""
        layer, casts = self.layer, self.layer.casts
        if casts_obstacle(casts) is not None or layer.lowbit.blend is not None or layer.lowbit.operand_sums is not None:
            return None
        if "dgrad_w" not in casts.traits.from_fprop:  # shared
            native = layer.native_gemms(self.record.device)  # if only one of the GEMMs is, they need different forms
            if ("fprop" in native) != ("dgrad" in native):
                return None
        return None if misfit(self.record, casts, self._dtype) else casts.fprop_w

    @property
    def is_gathered(self) -> bool:
        return not isinstance(self.layer.weight, DTensor)

    @property
    def is_outdated(self) -> bool:
        if not self.is_gathered:
            return False
        cast = self._cast
        changes = cast is not None and (cast.draws or cast.scale.source == "delayed")
        return cast != self.gathered_with or changes or self.layer.lowbit.weight_amax is not None

    @property
    def needs_statistic(self) -> bool:
        cast, is_shared = self._cast, self.layer.lowbit.weight_amax is not None
        return cast is not None and (not is_shared if cast.scale.needs_amax else cast.scale.block == "tensor")

    def _state(self, cast: Cast) -> tuple[Any, ...]:
        # A DTensor and its local tensor each count their own changes only.
        parameter: Any = self.record.sharded_param
        local = local_tensor(parameter)
        return cast, version_of(parameter), version_of(local), local.data_ptr()

    def _shard(self) -> Tensor:
        """Returns ``[rows, columns]`` in the dtype of the computation, padded with rows of zeros."""
        return self._rounded(self._local()).view(self.size())

    def _local(self) -> Tensor:
        """Returns the padded shard, 1-D, on the device (offloaded shards are on the CPU)."""
        return shard_data(self.record).to(self.record.device, non_blocking=True)

    def _rounded(self, values: Tensor) -> Tensor:
        return values.to(gathered_dtype(self.record)).to(self._dtype)

    def local_statistic(self) -> Tensor:
        """Returns the shard's amax, or its sum of magnitudes, float64, 0-d."""
        cast = self._cast
        assert cast is not None
        self.measured = self._state(cast)
        if cast.scale.needs_amax:  # rounding keeps the order: the rounded amax is the amax of the rounded shard
            return self._rounded(amax_of(self._local())).double()
        return block_sum(self._shard(), (0, 1)).reshape(())

    def take(self, amax: Tensor, total: Tensor) -> None:
        cast: Cast = self.measured[0]
        if cast.scale.needs_amax:
            self._amax, self._mean = amax.float(), None
        else:  # divided by a tensor: for a number, torch multiplies by the reciprocal
            self._amax, self._mean = None, (total / torch.full_like(total, self._shape.numel())).float()

    def size(self) -> torch.Size:  # FSDP2 asks for it
        return self.record.padded_sharded_param_size

    def to(self, *_: Any, **__: Any) -> "_Gather":
        """Returns itself: offloaded shards are moved when they are read."""
        return self

    @torch.inference_mode(False)  # evaluation may leave a weight gathered, for training to use
    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Returns the bytes to send, ``[1, ...]``, and the cast and whole scale for :meth:`fsdp_post_all_gather`."""
        cast, state = self._cast, self.layer.lowbit
        if cast is None:
            return (self._local().to(gathered_dtype(self.record)).view(1, -1),), None
        if self.needs_statistic and self.measured != self._state(cast):  # changed since, on all ranks alike
            self._gathers.measure()
        elif cast.scale.needs_amax and state.weight_amax is not None:
            self._amax = self._rounded(state.weight_amax).float()
        amax = self._amax if cast.scale.needs_amax else None
        if cast.scale.source == "delayed" and state.amaxes is not None:  # or else the layer says what is missing
            assert self._amax is not None
            amax = amax_in_force(state.amaxes.in_force, "fprop_w", self._amax)
        key = None if state.keys is None else state.keys[_W]
        data, factor = pack(self._shard(), cast, key, amax, self._mean if self.needs_statistic else None, self._part)
        return (data[None],), (cast, factor)

    @torch.inference_mode(False)
    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], sent: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Writes the weight, and describes it to the layer."""
        record, (data,) = self.record, outputs
        rows, columns = len(data) * record.padded_sharded_param_size[0], self._shape[1]
        if out is None:
            record.buffers = [torch.empty(rows * columns, dtype=param_dtype, device=data.device)]
        (buffer,) = record.buffers
        # As FSDP2 does: the parameter was saved for the backward pass, and is the same then.
        with unseen_writes([buffer]):
            weight = buffer.view(rows, columns)
            if sent is None:
                weight.copy_(data.view(rows, columns))
                self.gathered_with = self.layer.lowbit.prequantized_weight = None
            else:
                cast, factor = sent
                factor = unpack_(weight, data, factor, cast, self._dtype)
                factor = factor if factor is None or factor.dim() == 0 else factor[: self._shape[0]]
                self.gathered_with = cast
                dtype = operand_dtype(self._dtype, cast)
                self.layer.lowbit.prequantized_weight = PrequantizedWeight(self._dtype, dtype, factor, self._amax)
        record.all_gather_outputs = []  # of another size next time, perhaps, and no longer needed now
        return (buffer, [buffer]) if out is None else None
