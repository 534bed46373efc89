"""Formulas of ``lowbit estimate``, derived in ``docs/guides/estimating.md``.

d data-parallel groups of t tensor-parallel devices, m micro-batches; b, r bytes of compute dtype and parameters.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, prod

import torch

from lightning_lowbit.cli.lab.estimate.options import Assumptions, Batch, Device, Layout
from lightning_lowbit.cli.lab.estimate.shapes import Decoder, Model, Weight
from lightning_lowbit.nn.casts.traits import GEMMS
from lightning_lowbit.quant.operand import operand_dtype
from lightning_lowbit.quant.shard import ends_within

_STATISTICS = 4  # bytes of an element of norms, log-probabilities and log-sum-exp, always fp32


@dataclass(frozen=True)
class Collective:
    """All communication of one kind in a step."""

    name: str  # "all_reduce", "all_gather" or "reduce_scatter"
    of: str  # "parameters", "gradients" or "activations"
    payload: int  # bytes of the whole tensors
    ranks: int  # devices in the ring
    stride: int = 1  # distance between its neighbors

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a ring."""
        return (2 if self.name == "all_reduce" else 1) * (self.ranks - 1) / self.ranks * self.payload

    def bandwidth(self, device: Device, per_node: int) -> float:
        if self.ranks * self.stride <= per_node:
            return device.link
        return min(device.link, device.network * max(per_node // self.stride, 1))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: GEMMs by arithmetic, tensor-parallel communication, and data-parallel, which may overlap.

    ``launches`` are those of the host, which starts one operation after the other while the device computes, so the
    longer of both times counts.
    """

    gemms: Mapping[str, float] = field(default_factory=dict)
    tensor_parallel: float = 0.0
    data_parallel: float = 0.0
    launches: float = 0.0

    @property
    def compute(self) -> float:
        return max(sum(self.gemms.values()), self.launches)

    @property
    def captured(self) -> "StepTime":
        """The same in a CUDA graph, where the host starts the whole step at once."""
        return replace(self, launches=0.0)

    @property
    def hidden(self) -> float:
        return max(self.compute + self.tensor_parallel, self.data_parallel)

    @property
    def exposed(self) -> float:
        return self.compute + self.tensor_parallel + self.data_parallel


def memory(model: Model, batch: Batch, layout: Layout) -> dict[str, int]:
    """Returns bytes on the first device at the peak of the backward pass, by purpose; raises as :func:`check`."""
    check(model, layout)
    sizes = {
        "parameters": sum(_local(w, w.shape, layout) * w.itemsize for w in model.weights),
        "gradients": sum(_local(w, w.shape, layout) * w.itemsize for w in model.weights if w.trained),
        "optimizer state": sum(_local(w, shape, layout) * size for w in model.weights for shape, size in w.state),
    }
    if layout.strategy == "ddp" and layout.devices > 1:
        sizes["buckets of DDP"] = sizes["gradients"]
    if layout.shards > 1:
        rest, blocks = _units(model.weights)
        ordered: list[list[Weight]] = [[], [], *sorted(blocks, key=lambda block: _whole(block, layout))]
        sizes["gathered parameters"] = _whole([*rest, *ordered[-1]], layout) + _payload(ordered[-2], layout)
        reduced = sum(prod(w.shape) * _itemsize(w, layout) for w in rest if w.trained)
        sizes["gradients to reduce"] = max((_total(block, layout) for block in blocks), default=0) + reduced
    sizes["weights to compute with"] = weight_copies(model, layout)
    sizes["activations"] = saved_activations(model, batch, layout)
    sizes["peak of backward"] = backward_peak(model, batch, layout)
    return {name: size for name, size in sizes.items() if size}


def saved_activations(model: Model, batch: Batch, layout: Layout) -> int:
    """Returns the bytes that autograd saves in the forward pass of a micro-batch, without weights."""
    if (decoder := model.decoder) is None:
        widths = [model.compute if layer.saved is None else layer.saved for layer in model.layers]
        per_token = sum(x.rows * x.in_features * width for x, width in zip(model.layers, widths, strict=True))
        return batch.tokens * ceil(per_token)
    block = _residual(model, layout) * decoder.hidden if model.checkpointing else block_activations(model, layout)
    return batch.tokens * (decoder.blocks * block + _head_activations(model, layout))


def block_activations(model: Model, layout: Layout) -> int:
    """Returns the bytes per token that a decoder block saves for the backward pass."""
    decoder, b, r = model.decoder, model.compute, _residual(model, layout)
    assert decoder is not None
    copies = decoder.readers if b != r else 2
    q, k = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    attention = b * 2 * (q + k) + _STATISTICS * decoder.heads
    mlp = b * (4 if decoder.gated else 2) * decoder.intermediate
    inputs: float = copies * b * decoder.hidden
    if (saved := model.saved) is not None:  # codes; of a tensor that several layers read, only where they are smaller
        ups = decoder.readers - 3
        width = decoder.readers * saved if b != r else min(3 * saved, b) + min(ups * saved, b)
        inputs = width * decoder.hidden
        attention += ceil(saved * q)  # of the result, which attention itself keeps
        mlp -= floor((b - saved) * decoder.intermediate)
    return 2 * _norm(decoder, r) + ceil(inputs) + (attention + mlp) // layout.tensor_parallel


def _head_activations(model: Model, layout: Layout) -> int:
    decoder = model.decoder
    assert decoder is not None
    inputs = model.compute * decoder.hidden
    return _norm(decoder, _residual(model, layout)) + inputs + _STATISTICS * decoder.vocabulary


def _norm(decoder: Decoder, residual: int) -> int:
    return (_STATISTICS + residual) * decoder.hidden + _STATISTICS


def backward_peak(model: Model, batch: Batch, layout: Layout) -> int:
    """Returns bytes beyond saved activations: gradients of the logits, or a recomputed block's activations."""
    if model.decoder is None:
        return 0
    gradients = (_STATISTICS + model.compute) * model.decoder.vocabulary
    again = block_activations(model, layout) - _head_activations(model, layout) if model.checkpointing else 0
    return batch.tokens * max(gradients, again)


def weight_copies(model: Model, layout: Layout) -> int:
    """Returns bytes of matrices in the compute dtype, if they are stored or gathered in another one."""
    if model.compute == _residual(model, layout):
        return 0
    outside, blocks = _units(w for w in model.weights if w.matrix and not w.recast)
    inside = [sum(-(-prod(w.shape) // layout.tensor_parallel) for w in block) for block in blocks]
    elements = max(inside, default=0) if model.checkpointing else sum(inside)
    return model.compute * (sum(prod(w.shape) for w in outside) + elements)


def _units(weights: Iterable[Weight]) -> tuple[list[Weight], list[list[Weight]]]:
    """Returns the weights outside of blocks, and those of each block."""
    units: dict[str | None, list[Weight]] = {None: []}
    for weight in weights:
        units.setdefault(weight.block, []).append(weight)
    return units.pop(None), [*units.values()]


def _total(weights: Sequence[Weight], layout: Layout) -> int:
    return sum(w.itemsize * prod(w.shape) // _tensor_parallel(w, layout) for w in weights if w.trained)


def _tensor_parallel(weight: Weight, layout: Layout) -> int:
    return layout.tensor_parallel if weight.matrix and weight.block is not None else 1


def _local(weight: Weight, shape: tuple[int, ...], layout: Layout) -> int:
    """Counts elements on the first device of a tensor like the weight; if sharded, it has whole rows."""
    if not shape or not weight.shape or shape[0] != weight.shape[0]:
        return prod(shape)
    whole = -(-shape[0] // layout.shards) * prod(shape[1:])
    return -(-whole // _tensor_parallel(weight, layout))


def _residual(model: Model, layout: Layout) -> int:
    return max((_itemsize(weight, layout) for weight in model.weights), default=4)


def _itemsize(weight: Weight, layout: Layout) -> int:
    """Returns bytes of a weight's element as its layer gets it, after gathering."""
    return 2 if "bf16" in layout.gather and layout.shards > 1 else weight.itemsize


def check(model: Model, layout: Layout) -> None:
    """Raises a ``ValueError`` if a layout does not suit a model: its blocks, its heads, or the casts of its weights."""
    if "casts" in layout.gather and layout.shards > 1 and not any(_is_packed(w, layout) for w in model.weights):
        raise ValueError(
            "No weight can be gathered as its casts quantize it: they do not allow it (those of 'nvfp4-nvidia' and "
            "'fp8-current' do), tensor parallelism cuts it, or shards end within tiles of its scales. Give --gather "
            "stored or --gather bf16."
        )
    t, decoder = layout.tensor_parallel, model.decoder
    if t == 1:
        return
    if decoder is None:
        raise ValueError("--tensor_parallel cuts the blocks of a decoder, and this model is none: leave it out.")
    for name in ("heads", "kv_heads", "intermediate"):
        if (size := getattr(decoder, name)) % t:
            raise ValueError(f"--tensor_parallel {t} does not divide the model's {name}, {size}: give a divisor.")


def flops(model: Model, batch: Batch, layout: Layout) -> dict[str, int]:
    """Counts FLOPs of a device in a step, by arithmetic, and under ``"attention"``."""
    counted = Counter[str]()
    for layer in model.layers:
        share = layout.tensor_parallel if layer.in_block else 1
        rows = batch.tokens * layer.rows * batch.micro_batches
        one = 2 * rows * layer.in_features * layer.out_features // share
        again = ["fprop"] if model.checkpointing and layer.in_block else []
        for gemm in [*GEMMS, *again]:
            counted[layer.arithmetic[gemm]] += one
    if decoder := model.decoder:
        width = decoder.heads * decoder.head_dim // layout.tensor_parallel
        passes = 4 + 10 + (4 if model.checkpointing else 0)
        counted["attention"] += passes * batch.tokens * batch.length * width * decoder.blocks * batch.micro_batches
    return dict(counted)


def communication(model: Model, batch: Batch, layout: Layout) -> list[Collective]:
    check(model, layout)
    d, t, m = layout.data_parallel, layout.tensor_parallel, batch.micro_batches
    collectives = []
    if d > 1 and layout.strategy == "ddp":
        collectives.append(Collective("all_reduce", "gradients", _total(model.weights, layout), d))
    if d > 1 and layout.strategy == "fsdp":
        inside = [w for w in model.weights if w.block is not None]
        parameters = _payload(model.weights, layout) + _payload(inside, layout)
        gradients = sum(d * _local(w, w.shape, layout) * w.itemsize for w in model.weights if w.trained)
        collectives.append(Collective("all_gather", "parameters", m * parameters, d, t))
        collectives.append(Collective("reduce_scatter", "gradients", m * gradients, d, t))
    if t > 1 and model.decoder:
        forward = (3 if model.checkpointing else 2) * model.compute
        backward = model.decoder.readers * _residual(model, layout)
        payload = m * model.decoder.blocks * batch.tokens * model.decoder.hidden * (forward + backward)
        collectives.append(Collective("all_reduce", "activations", payload, t))
    return collectives


def _payload(weights: Sequence[Weight], layout: Layout) -> int:
    """Returns bytes of gathered weights in communication; each device sends equally many rows."""

    def bits(weight: Weight) -> float:
        return weight.packed.bits if weight.packed and _is_packed(weight, layout) else 8.0 * _itemsize(weight, layout)

    return round(sum(layout.shards * _local(w, w.shape, layout) * bits(w) for w in weights) / 8)


def _whole(weights: Sequence[Weight], layout: Layout) -> int:
    return sum(layout.shards * _local(w, w.shape, layout) * _itemsize(w, layout) for w in weights)


def _is_packed(weight: Weight, layout: Layout) -> bool:
    cast = weight.packed
    if "casts" not in layout.gather or cast is None or _tensor_parallel(weight, layout) > 1:
        return False
    block, rows = cast.scale.block, -(-weight.shape[0] // layout.shards)
    if isinstance(block, tuple) and ends_within(rows, weight.shape[0], block[0]):
        return False
    return operand_dtype(torch.bfloat16, cast).itemsize <= _itemsize(weight, layout)


# On the same host all else of a decoder block in bf16 (166 launches of torch) took 7 ms, as long as 140 operations of
# layers in few bits.
_OPERATIONS_OF_A_BLOCK = 140


def launches(model: Model, batch: Batch) -> int:
    """Counts the operations that the host starts in a step, in units of those of a quantized layer."""
    blocks = model.decoder.blocks if model.decoder is not None else 0
    return batch.micro_batches * (sum(layer.operations for layer in model.layers) + _OPERATIONS_OF_A_BLOCK * blocks)


def times(model: Model, batch: Batch, layout: Layout, device: Device, assumed: Assumptions | None = None) -> StepTime:
    """Returns the time of a step; arithmetic that a device lacks runs in the compute dtype, which it must have."""
    assumed = assumed or Assumptions()
    counted = Counter[str]()
    for kind, count in flops(model, batch, layout).items():
        counted[kind if kind in device.peaks else model.high] += count
    if lacking := [kind for kind in counted if kind not in device.peaks]:
        raise ValueError(f"The device has no peak for {lacking[0]}: give --peak {lacking[0]}=TFLOPS.")
    gemms = {kind: count / device.peaks[kind] / assumed.utilization for kind, count in counted.items()}
    seconds = {"tensor_parallel": 0.0, "data_parallel": 0.0, "launches": launches(model, batch) * assumed.launch}
    for collective in communication(model, batch, layout):
        kind = "tensor_parallel" if collective.of == "activations" else "data_parallel"
        bandwidth = collective.bandwidth(device, layout.per_node)
        seconds[kind] += collective.sent / bandwidth / assumed.link_utilization
    return StepTime(gemms, **seconds)
