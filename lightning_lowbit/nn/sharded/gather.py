"""FSDP2 with cheap communication: weights are quantized on their shards, and codes and scales are gathered.

    shard [rows / n, columns]    in the dtype of the computation, as the layer would cast it
      quantize                   with scales and random bits of the whole (:mod:`lightning_lowbit.quant.shard`)
      all-gather                 uint8: 4.5 bits per element of NVFP4 instead of 16 or 32
      unpack                     the operand's values, in the dtype that FSDP2 gives the weight
    GEMMs                        take these as the operand that they are; gradients go straight through

Results are, to the bit, those of gathering in high precision. So a weight is gathered in few bits while both GEMMs that
read it can do with what the forward pass uses, as its layer computes at that time; else its shards travel as they are.
FSDP2 gathers again for the backward pass, and gets the same.

FSDP2 asks the local tensor of a sharded parameter for two methods. Tensors are replaced (loading, ``module.to``), so
that what hangs on them is lost, and optimizers and checkpoints would meet a class of their own. Here FSDP2's record of
the parameter answers instead, which lives as long as the module is sharded, and parameters stay what they are.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from lightning_lowbit.nn.casts import OPERANDS, LinearCasts
from lightning_lowbit.nn.conversion.convert import some
from lightning_lowbit.nn.function import PrequantizedWeight
from lightning_lowbit.nn.layer_amaxes import amax_in_force
from lightning_lowbit.nn.linear import QuantizedLayer, quantized_class
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.operand import operand_dtype
from lightning_lowbit.quant.packed import pack, unpack_
from lightning_lowbit.quant.scaling import block_sum
from lightning_lowbit.quant.shard import Shard, amax_of, ends_within

_W = OPERANDS.index("fprop_w")


@cache
def obstacle(casts: LinearCasts) -> str | None:
    """Why weights of layers with these casts have to be gathered in high precision; None if they have not."""
    cast = casts.fprop_w
    if not isinstance(cast, Cast):
        return "fprop_w is not quantized"
    if casts.dgrad_w != "fprop" and not casts.shared("dgrad_w"):
        return "dgrad_w is not the weight that the forward pass used"
    if cast.scale.statistic == "minmax":
        return "fprop_w has zero points"
    if "fprop" in casts.hadamard or "fprop" in casts.subtract_mean:
        return "fprop takes the weight itself, for hadamard or subtract_mean"
    if "fprop_w" in casts.surrogate:
        return "the surrogate of fprop_w asks for the weight itself"
    if casts.smooth == "channel":
        return "smooth='channel' scales the weight with each batch"
    return None


class WeightGathers:
    """Has FSDP2 gather the weights of a model's converted layers in few bits wherever results stay the same.

    A weight qualifies if it belongs to one ``nn.Linear`` alone, is cut along ``out_features`` by FSDP2 and by nothing
    else, and shards end where the tiles of its cast do. Layers must be called: whoever reads ``layer.weight`` during a
    pass meets the quantized one, without the scale of the tensor.

    Args:
        model: holds converted layers, and ``fully_shard`` has been applied to it.
        dtype: of the computation, that of autocast; None where there is none.
        casts: of the layers, by name, of which one has to allow it; None for those that they have outside any phase.

    Raises:
        ValueError: as :func:`check_gathers`.

    Example:
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
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
        check_gathers(model, casts or {name: layer.full_casts for name, layer in layers.items()}, dtype)
        release_gathers(model)
        self._gathers = [
            _Gather(self, record, module, dtype)
            for module, record in _records(model)
            if isinstance(record._module_info.module, QuantizedLayer) and _is_plain(record)
        ]

    def release(self) -> None:
        """Has FSDP2 gather the weights as they are again."""
        for gather in self._gathers:
            _release(gather.module, gather.record)

    def prepare(self) -> None:
        """Before a forward pass: what casts need to know of whole weights, by one collective per process group.

        Weights that are still gathered, in a form that is no longer theirs, are sharded again.
        """
        self.measure()
        for gather in self._gathers:
            if gather.is_outdated:
                gather.module.reshard()

    def reshard(self) -> None:
        """After a pass that no backward pass follows: whoever reads parameters meets them as they are.

        FSDP2 keeps those of the root gathered then.
        """
        for gather in self._gathers:
            if gather.is_gathered and gather.gathered_with is not None:
                gather.module.reshard()

    def forget(self) -> None:
        """Weights have changed: what was measured of them is measured anew when it is needed.

        Most changes are seen without; those by ``parameter.data`` are not.
        """
        for gather in self._gathers:
            gather.measured = ()

    @torch.inference_mode(False)  # evaluation may be what asks first, and training goes on with it
    @torch.no_grad()  # which the line above ends
    def measure(self) -> None:
        """Measures all weights that need it."""
        groups: dict[dist.ProcessGroup, list[_Gather]] = {}
        for gather in self._gathers:
            if gather.needs_statistic:
                groups.setdefault(gather.group, []).append(gather)
        for group, gathers in groups.items():
            # float64 holds a largest magnitude exactly, and a sum of magnitudes as `block_sum` does.
            own = torch.stack([gather.own_statistic() for gather in gathers])
            of_all = own.new_empty(group.size() * len(own))
            dist.all_gather_single(of_all, own, group)
            of_all = of_all.view(-1, len(own))
            for gather, amax, total in zip(gathers, of_all.amax(0).unbind(), of_all.sum(0).unbind(), strict=True):
                gather.take(amax, total)


def check_gathers(model: nn.Module, casts: Mapping[str, LinearCasts], dtype: torch.dtype | None) -> None:
    """Raises if no weight of a model could be gathered in few bits, with its casts outside any phase.

    Args:
        model: converted, or to be.
        casts: of its layers, by name.
        dtype: as :class:`WeightGathers` takes it.

    Raises:
        ValueError: so, or FSDP2 has not sharded the layers.
    """
    records = {id(record._module_info.module): record for _, record in _records(model)}
    told: dict[str, list[str]] = {}
    for name, of_layer in casts.items():
        if (record := records.get(id(model.get_submodule(name)))) is None:
            continue
        if (why := obstacle(of_layer) or _misfit(record, of_layer, dtype)) is None:
            return
        told.setdefault(why, []).append(name)
    if not told:
        raise ValueError(
            "quantize_before_gather: FSDP2 shards no weight of a converted layer. It needs ModelParallelStrategy, and "
            "torch.distributed.fsdp.fully_shard in configure_model; leave it out with other strategies."
        )
    raise ValueError(
        "quantize_before_gather: no weight can be gathered in few bits. "
        f"{'; '.join(f'{some(names)}: {why}' for why, names in told.items())}. Take casts whose backward pass uses the "
        "weight of the forward pass, some with overrides: 'nvfp4-nvidia', 'fp8-delayed', 'int4', any dgrad_w='fprop'."
    )


def release_gathers(model: nn.Module) -> None:
    """Has FSDP2 gather all weights of a model as they are again."""
    for module, record in _records(model):
        _release(module, record)


def _release(module: FSDPModule, record: FSDPParam) -> None:
    if isinstance(record, _Record):
        module.reshard()
        record.release()


def _records(model: nn.Module) -> Iterator[tuple[FSDPModule, FSDPParam]]:
    """FSDP2's record of each weight, with the module that gathers it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                # Resharded to a smaller mesh, parameters do without a method of their own.
                if not group._use_post_forward_mesh:
                    yield from ((module, p) for p in group.fsdp_params if p._module_info.param_name == "weight")


def _is_plain(record: FSDPParam) -> bool:
    """Whether a weight is one layer's alone, and cut by FSDP2 along the rows and by nothing else."""
    info = record._module_info
    layer = quantized_class(type(info.module))  # type: ignore[arg-type]
    return (
        layer is not None
        and layer.weight_matrix is QuantizedLayer.weight_matrix
        and not info.shared_modules
        and not record.is_dtensor
        and isinstance(record.mesh_info, FSDPMeshInfo)
        and record.fsdp_placement.dim == 0
    )


def _gathered_dtype(record: FSDPParam) -> torch.dtype:
    """What FSDP2 gives the layer."""
    return record.mp_policy.param_dtype or record.sharded_param.dtype


def _misfit(record: FSDPParam, casts: LinearCasts, dtype: torch.dtype | None) -> str | None:
    """Why a weight that casts allow to be gathered in few bits is not; None if it is."""
    given, (step, *_), cast = _gathered_dtype(record), record.padded_sharded_param_size, casts.fprop_w
    assert isinstance(cast, Cast)
    if not _is_plain(record):
        return "the weight is not one nn.Linear's alone, or not cut along its rows by FSDP2 alone"
    if isinstance(cast.scale.block, tuple) and ends_within(step, record._orig_size[0], cast.scale.block[0]):
        return f"shards of {step} rows end within a tile of {cast.scale.block[0]}"
    if given not in (torch.float32, operand_dtype(dtype or given, cast)):
        return f"FSDP2 gives the weight in {given}, which does not hold the operand"
    return None


class _Record(FSDPParam):
    """FSDP2's record of a parameter, whose extension is a :class:`_Gather` instead of the local tensor itself."""

    gather: "_Gather"

    @property
    def _sharded_local_tensor(self) -> Any:
        return self.gather

    def _init_extensions(self) -> None:
        """Anew when training starts: what holds the gathered parameter stays."""
        buffers = self._unsharded_inner_tensors
        super()._init_extensions()
        self._unsharded_inner_tensors = buffers

    def release(self) -> None:
        """Back to FSDP2's own."""
        self.__class__ = FSDPParam  # type: ignore[assignment]
        self.all_gather_outputs, self._unsharded_inner_tensors = self._unsharded_inner_tensors, []
        vars(self.gather.layer).pop("prequantized_weight", None)
        del self.gather


class _Gather:
    """How one weight is gathered: what FSDP2 calls an extension of the all-gather.

    Attributes:
        record: FSDP2's of the weight.
        layer: whose weight it is.
        module: the one that gathers it.
        group: the process group that holds the shards.
        measured: of what the statistics are: the cast, and the weight's version and place.
        gathered_with: the cast that the weight was gathered with last; None for as it is.
    """

    def __init__(
        self, gathers: WeightGathers, record: FSDPParam, module: FSDPModule, dtype: torch.dtype | None
    ) -> None:
        self._gathers, self.record, self.module = gathers, record, module
        self.layer: Any = record._module_info.module
        self.group: dist.ProcessGroup = record.shard_mesh.get_group()
        self._shape = record._orig_size
        self._dtype = dtype or _gathered_dtype(record)
        step = record.padded_sharded_param_size[0]
        self._part = Shard(self.group.group_name, 0, self.group.rank() * step, step, self._shape[0])
        self.measured: tuple[Any, ...] = ()
        self._amax: Tensor | None = None
        self._mean: Tensor | None = None
        self.gathered_with: Cast | None = None
        module.reshard()
        # What FSDP2 had gathered into becomes what is unpacked into: an optimizer or graph may know the parameter.
        buffers = record._unsharded_inner_tensors or record.all_gather_outputs
        record.__class__ = _Record
        vars(record)["gather"] = self
        record._init_extensions()
        record._unsharded_inner_tensors, record.all_gather_outputs = buffers, []

    # --- what is in force ---

    @property
    def _cast(self) -> Cast | None:
        """That with which the weight is to be gathered now; None for as it is."""
        layer, casts = self.layer, self.layer.casts
        if obstacle(casts) is not None or layer.blend is not None or layer.operand_sums is not None:
            return None
        if casts.dgrad_w != "fprop":  # shared: GEMMs of which one is native take it in two forms
            native = layer.native_gemms(self.record.device)
            if ("fprop" in native) != ("dgrad" in native):
                return None
        return None if _misfit(self.record, casts, self._dtype) else casts.fprop_w

    @property
    def is_gathered(self) -> bool:
        """Whether the layer has the whole weight now."""
        return not isinstance(self.layer.weight, DTensor)

    @property
    def is_outdated(self) -> bool:
        """Whether the weight is gathered, and would be gathered otherwise now."""
        if not self.is_gathered:
            return False
        cast = self._cast
        changes = cast is not None and (cast.rounding == "stochastic" or cast.scale.source == "delayed")
        return cast != self.gathered_with or changes or self.layer.weight_amax is not None

    # --- statistics ---

    @property
    def needs_statistic(self) -> bool:
        """Whether the cast in force asks for one of the whole weight."""
        cast = self._cast
        if cast is not None and cast.scale.needs_amax:
            return self.layer.weight_amax is None
        return cast is not None and cast.scale.block == "tensor"

    def _state(self, cast: Cast) -> tuple[Any, ...]:
        # An operation on a DTensor counts as a change of that one alone, and one on its local tensor likewise.
        parameter: Any = self.record.sharded_param
        local = parameter._local_tensor
        return cast, parameter._version, local._version, local.data_ptr()

    def _shard(self) -> Tensor:
        """``[rows, columns]``, with rows of zeros where this process has fewer, as the layer would cast the whole."""
        return self._rounded(self._own()).view(self.size())

    def _own(self) -> Tensor:
        """What is here, padded: 1-D. Offloaded shards are on the CPU."""
        return self.record._sharded_param_data.to(self.record.device, non_blocking=True)

    def _rounded(self, values: Tensor) -> Tensor:
        return values.to(_gathered_dtype(self.record)).to(self._dtype)

    def own_statistic(self) -> Tensor:
        """Of this process: the largest magnitude, or the sum of magnitudes, float64, 0-d."""
        cast = self._cast
        assert cast is not None
        self.measured = self._state(cast)
        if cast.scale.needs_amax:  # rounding keeps the order, so that the one number may be rounded
            return self._rounded(amax_of(self._own())).double()
        return block_sum(self._shard(), (0, 1)).reshape(())

    def take(self, amax: Tensor, total: Tensor) -> None:
        """Takes what the processes have found together; of the two, what the cast asks for."""
        cast: Cast = self.measured[0]
        if cast.scale.needs_amax:
            self._amax, self._mean = amax.float(), None
        else:  # by a tensor: torch divides by a number as it multiplies by its reciprocal
            self._amax, self._mean = None, (total / torch.full_like(total, self._shape.numel())).float()

    # --- as FSDP2 calls it ---

    def size(self) -> torch.Size:
        """Of a shard, padded: what is sent is made of all of it on each process."""
        return self.record.padded_sharded_param_size

    def to(self, *_: Any, **__: Any) -> "_Gather":
        """Itself: shards that are offloaded are moved when they are read."""
        return self

    @torch.inference_mode(False)  # evaluation may leave a weight gathered, for training to use
    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What is sent, ``[1, ...]``, and for :meth:`fsdp_post_all_gather` the cast and the scale of the whole."""
        cast = self._cast
        if cast is None:
            return (self._own().to(_gathered_dtype(self.record)).view(1, -1),), None
        if self.needs_statistic and self.measured != self._state(cast):  # changed since, on all ranks alike
            self._gathers.measure()
        elif cast.scale.needs_amax and self.layer.weight_amax is not None:
            self._amax = self._rounded(self.layer.weight_amax).float()
        amax = self._amax if cast.scale.needs_amax else None
        if cast.scale.source == "delayed" and self.layer.amaxes is not None:  # or else the layer says what is missing
            assert self._amax is not None
            amax = amax_in_force(self.layer.amaxes.in_force, "fprop_w", self._amax)
        key = None if self.layer.keys is None else self.layer.keys[_W]
        data, factor = pack(self._shard(), cast, key, amax, self._mean if self.needs_statistic else None, self._part)
        return (data[None],), (cast, factor)

    @torch.inference_mode(False)
    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], sent: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Writes the weight, and tells the layer what it is."""
        record, (data,) = self.record, outputs
        rows, columns = len(data) * record.padded_sharded_param_size[0], self._shape[1]
        if out is None:
            record._unsharded_inner_tensors = [torch.empty(rows * columns, dtype=param_dtype, device=data.device)]
        (buffer,) = record._unsharded_inner_tensors
        # As FSDP2 does: the parameter was saved for the backward pass, and is the same then.
        with torch.autograd._unsafe_preserve_version_counter(buffer):  # type: ignore[attr-defined]
            weight = buffer.view(rows, columns)
            if sent is None:
                weight.copy_(data.view(rows, columns))
                self.gathered_with = self.layer.prequantized_weight = None
            else:
                cast, factor = sent
                factor = unpack_(weight, data, factor, cast, self._dtype)
                factor = factor if factor is None or factor.dim() == 0 else factor[: self._shape[0]]
                self.gathered_with = cast
                dtype = operand_dtype(self._dtype, cast)
                self.layer.prequantized_weight = PrequantizedWeight(self._dtype, dtype, factor, self._amax)
        record.all_gather_outputs = []  # of another size next time, perhaps, and no longer needed now
        return (buffer, [buffer]) if out is None else None
