"""What memory, communication and time a training step should take: formulas, and no measurement.

Symbols: d data-parallel groups of t tensor-parallel devices; s tokens of a sequence, n tokens of a micro-batch on a
device, m micro-batches of a step; h, f, V widths of the residual stream, the MLP and the vocabulary; a heads that make
q features, k features of keys (and of values); b bytes of the dtype that is computed in, r of that of parameters.

**Memory of a device, in bytes.** Parameters are what the model has, gradients are like parameters, and the optimizer's
state is what it really makes, in a step without numbers: 8 per parameter for Adam in fp32, 2 + 8/128 for FP8 moments in
blocks of 128. Under FSDP a device has ⌈rows/d⌉ rows of each (ZeRO, arXiv 1910.02054, stage 3). DDP keeps gradients
once more, in its buckets. FSDP has whole parameters of the block that computes and of what belongs to none, the next
block as it travels, and whole gradients of one block, as they are reduced, and of what belongs to none.

A decoder block as LLaMA's keeps for the backward pass, per token, in the manner of Korthikanti et al. (arXiv
2205.05198, section 4, who count the block of GPT):

    two RMSNorms            2 · ((4 + r) h + 4)      input in fp32, what the weight multiplies, 1/rms in fp32
    inputs of q, k, v       3 b h                    each linear layer casts its own; 1 b h where b = r: nothing is cast
    inputs of gate, up      2 b h                    likewise
    attention               b (2 q + 2 k) + 4 a      q, k, v, output, log-sum-exp: a kernel that keeps no scores
    SwiGLU                  4 b f                    gate, its SiLU, up, their product; 2 b f for an MLP without a gate

and the head (4 + r) h + 4 + b h + 4 V, of which the last are log-probabilities; their gradient takes (4 + b) V more.
With activation checkpointing a block keeps its input, r h, and one block at a time all of it, when the head is gone. Of
tensor parallelism each device has a t-th of attention and SwiGLU (section 4.2.1 there; norms stay whole, there being no
sequence parallelism), and of the weights in blocks. Where b ≠ r, a linear layer also keeps its weight once more, in the
dtype that is computed in: under FSDP, too, all of the whole model, unless blocks are checkpointed or parameters are
gathered in that dtype, which is then r. A weight that travels in few bits is unpacked into what the others are gathered
in, and changes nothing of this.

**FLOPs.** A linear layer [out, in] takes 2 n·in·out for each of fprop, dgrad and wgrad, and fprop once more where
activations are computed again (but for the last one of a block if it is not converted, where torch stops: that is not
taken off). Attention takes 4 n s q forward and 10 n s q backward, where scores are computed again; what a causal kernel
leaves out is counted, as usual.

**Communication.** In a ring of p devices each sends 2 (p-1)/p of what is all-reduced, and (p-1)/p of what is gathered
or reduced and scattered (Patarasuk and Yuan, 2009).

    DDP                all-reduce of gradients         once a step
    FSDP               all-gather of parameters        m times, those in blocks 2 m times: forward and backward pass
                       reduce-scatter of gradients     m times
    tensor parallel    all-reduce of b n h             2 m times per block, of what the o and down projections give; 3 m
                                                       times where activations are computed again, up to the last one
                       all-reduce of r n h             m times per block for each of q, k, v, gate and up: of the
                                                       gradient of what they read

These are those of the recipes: Megatron-LM (arXiv 1909.08053, section 3) first adds up the gradients of q, k, v, and of
gate, up. Weights travel as codes and scales (:mod:`~lightning_lowbit.nn.sharded`) where their casts allow it, tensor
parallelism does not cut them, and shards end where tiles do.

**Time.** FLOPs over the peak of their arithmetic times its assumed utilization, plus bytes over bandwidth likewise,
with data-parallel communication wholly hidden behind GEMMs, or not at all. Between nodes all network cards of a node
work on a ring: its bandwidth is that of one card times the devices of a node that take part, or that within a node
where this is less.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from lightning_lowbit.checks import choose
from lightning_lowbit.cli.estimate.devices import Device
from lightning_lowbit.cli.estimate.shapes import Decoder, Model, Weight
from lightning_lowbit.nn.casts import GEMMS
from lightning_lowbit.quant.operand import operand_dtype
from lightning_lowbit.quant.shard import ends_within

STRATEGIES = ("ddp", "fsdp")
GATHERS = ("stored", "bf16", "casts", "casts+bf16")

_STATISTICS = 4  # bytes of what is always fp32: norms, log-probabilities, log-sum-exp


@dataclass(frozen=True)
class Batch:
    """What a device trains on in a step: micro-batches of some sequences of some tokens."""

    sequences: int
    length: int
    micro_batches: int = 1

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Layout:
    """How a model lies on devices.

    Attributes:
        devices: all of them.
        strategy: ``"ddp"``: whole on each; ``"fsdp"``: FSDP2, each decoder block a unit and the rest one more.
        tensor_parallel: how many share a block's matrices.
        gather: what FSDP gathers: parameters as they are ``"stored"``, or in ``"bf16"``; or matrices as their casts
            quantize them, where these allow it, and the rest as it is stored, ``"casts"``, or in bf16,
            ``"casts+bf16"``. Gradients are reduced in the dtype of the parameters.
        per_node: devices of a node.

    Raises:
        ValueError: these contradict each other.
    """

    devices: int = 1
    strategy: str = "ddp"
    tensor_parallel: int = 1
    gather: str = "stored"
    per_node: int = 8

    def __post_init__(self) -> None:
        choose("strategy", self.strategy, STRATEGIES)
        choose("--gather", self.gather, GATHERS)
        for name in ("devices", "tensor_parallel", "per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is 1 or more; got {getattr(self, name)}.")
        if self.devices % self.tensor_parallel:
            raise ValueError(
                f"{self.devices} devices do not divide into groups of {self.tensor_parallel}: give a --tensor_parallel "
                "that divides --devices."
            )
        if self.strategy == "ddp" and self.tensor_parallel > 1:
            raise ValueError("Tensor parallelism comes with ModelParallelStrategy: give --strategy fsdp.")
        if self.strategy == "ddp" and self.gather != "stored":
            raise ValueError(f"--gather {self.gather} is what FSDP gathers, and DDP gathers nothing: leave it out.")

    @property
    def data_parallel(self) -> int:
        """Groups that see different batches."""
        return self.devices // self.tensor_parallel

    @property
    def shards(self) -> int:
        """Parts that each parameter is cut into, beside tensor parallelism."""
        return self.data_parallel if self.strategy == "fsdp" else 1


@dataclass(frozen=True)
class Collective:
    """All communication of one kind in a step.

    Attributes:
        name: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        of: what is communicated.
        payload: bytes of the whole tensors, those that each device has before or after.
        ranks: how many devices take part.
        stride: from one of them to the next, in devices: those between share its tensors.
    """

    name: str
    of: str
    payload: int
    ranks: int
    stride: int = 1

    @property
    def sent(self) -> float:
        """Bytes that each device sends, in a ring."""
        return (2 if self.name == "all_reduce" else 1) * (self.ranks - 1) / self.ranks * self.payload

    def bandwidth(self, device: Device, per_node: int) -> float:
        """Bytes/s of the ring, at their peak."""
        if self.ranks * self.stride <= per_node:
            return device.link
        return min(device.link, device.network * max(per_node // self.stride, 1))


@dataclass(frozen=True)
class Assumptions:
    """Shares of the peak that GEMMs and links are taken to reach; nothing here has been measured."""

    utilization: float = 0.4
    link_utilization: float = 0.7

    def __post_init__(self) -> None:
        for name in ("utilization", "link_utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"--{name} is a share of the peak, above 0 and at most 1; got {getattr(self, name)}.")


@dataclass(frozen=True)
class Times:
    """Seconds of a step.

    Attributes:
        gemms: by arithmetic.
        tensor_parallel: communication that GEMMs wait for.
        data_parallel: communication that may hide behind them.
    """

    gemms: Mapping[str, float] = field(default_factory=dict)
    tensor_parallel: float = 0.0
    data_parallel: float = 0.0

    @property
    def hidden(self) -> float:
        """With data-parallel communication behind everything else as far as that lasts."""
        return max(sum(self.gemms.values()) + self.tensor_parallel, self.data_parallel)

    @property
    def exposed(self) -> float:
        """With one after the other."""
        return sum(self.gemms.values()) + self.tensor_parallel + self.data_parallel


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(model: Model, batch: Batch, layout: Layout) -> dict[str, int]:
    """Bytes on the first device, by what they are for; all there at one time, in the backward pass.

    Raises:
        ValueError: as :func:`check`.
    """
    check(model, layout)
    found = {
        "parameters": sum(_local(w, w.shape, layout) * w.itemsize for w in model.weights),
        "gradients": sum(_local(w, w.shape, layout) * w.itemsize for w in model.weights if w.trained),
        "optimizer state": sum(_local(w, shape, layout) * size for w in model.weights for shape, size in w.state),
    }
    if layout.strategy == "ddp" and layout.devices > 1:
        found["buckets of DDP"] = found["gradients"]
    if layout.shards > 1:
        found["gathered parameters"] = _gathered(model, layout)
        blocks = [_total(weights, layout) for weights in _units(model).values()]
        rest = sum(prod(w.shape) * _given(w, layout) for w in _rest(model) if w.trained)
        found["gradients to reduce"] = max(blocks, default=0) + rest
    found["weights to compute with"] = weight_copies(model, layout)
    found["activations"] = saved_activations(model, batch, layout)
    found["peak of backward"] = backward_peak(model, batch, layout)
    return {name: size for name, size in found.items() if size}


def saved_activations(model: Model, batch: Batch, layout: Layout) -> int:
    """Bytes that autograd keeps of a micro-batch when the forward pass is over; weights are not among them."""
    if model.decoder is None:
        return batch.tokens * model.compute * sum(layer.in_features for layer in model.layers)
    kept = _residual(model, layout) * model.decoder.hidden if model.checkpointing else block_activations(model, layout)
    return batch.tokens * (model.decoder.blocks * kept + _head_activations(model, layout))


def block_activations(model: Model, layout: Layout) -> int:
    """Bytes per token that a decoder block keeps when it has computed."""
    decoder, b, r = model.decoder, model.compute, _residual(model, layout)
    assert decoder is not None
    copies = decoder.readers if b != r else 2
    q, k = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    attention = b * 2 * (q + k) + _STATISTICS * decoder.heads
    mlp = b * (4 if decoder.gated else 2) * decoder.intermediate
    return 2 * _norm(decoder, r) + copies * b * decoder.hidden + (attention + mlp) // layout.tensor_parallel


def _head_activations(model: Model, layout: Layout) -> int:
    decoder = model.decoder
    assert decoder is not None
    inputs = model.compute * decoder.hidden
    return _norm(decoder, _residual(model, layout)) + inputs + _STATISTICS * decoder.vocabulary


def _norm(decoder: Decoder, residual: int) -> int:
    return (_STATISTICS + residual) * decoder.hidden + _STATISTICS


def backward_peak(model: Model, batch: Batch, layout: Layout) -> int:
    """Bytes on top of saved activations: gradients of the logits or, when the head is gone, a block's activations."""
    if model.decoder is None:
        return 0
    gradients = (_STATISTICS + model.compute) * model.decoder.vocabulary
    again = block_activations(model, layout) - _head_activations(model, layout) if model.checkpointing else 0
    return batch.tokens * max(gradients, again)


def weight_copies(model: Model, layout: Layout) -> int:
    """Bytes of matrices in the dtype that is computed in, where another one is stored or gathered."""
    if model.compute == _residual(model, layout):
        return 0
    matrices = [w for w in model.weights if w.matrix]
    outside = sum(prod(w.shape) for w in matrices if w.block is None)
    of_blocks = Counter[str]()
    for weight in matrices:
        if weight.block is not None:
            of_blocks[weight.block] += -(-prod(weight.shape) // layout.tensor_parallel)
    inside = max(of_blocks.values(), default=0) if model.checkpointing else sum(of_blocks.values())
    return model.compute * (outside + inside)


def _gathered(model: Model, layout: Layout) -> int:
    """What belongs to no block and the block that computes, as layers take them, and the next one as it travels."""
    blocks = sorted(_units(model).values(), key=lambda weights: _whole(weights, layout))
    taken = [_rest(model), *blocks[-1:]]
    return sum(_whole(weights, layout) for weights in taken) + sum(_payload(each, layout) for each in blocks[-2:-1])


def _units(model: Model) -> dict[str, list[Weight]]:
    """The weights of each decoder block."""
    units: dict[str, list[Weight]] = {}
    for weight in model.weights:
        if weight.block is not None:
            units.setdefault(weight.block, []).append(weight)
    return units


def _rest(model: Model) -> list[Weight]:
    """The weights outside of decoder blocks."""
    return [weight for weight in model.weights if weight.block is None]


def _total(weights: Sequence[Weight], layout: Layout) -> int:
    return sum(w.itemsize * prod(w.shape) // _tensor_parallel(w, layout) for w in weights if w.trained)


def _tensor_parallel(weight: Weight, layout: Layout) -> int:
    return layout.tensor_parallel if weight.matrix and weight.block is not None else 1


def _local(weight: Weight, shape: tuple[int, ...], layout: Layout) -> int:
    """Elements of a tensor on the first device: whole rows, if it is spread as the weight is."""
    if not shape or not weight.shape or shape[0] != weight.shape[0]:
        return prod(shape)
    whole = -(-shape[0] // layout.shards) * prod(shape[1:])
    return -(-whole // _tensor_parallel(weight, layout))


def _residual(model: Model, layout: Layout) -> int:
    """Bytes of an element of what parameters give: embeddings, norms and what lies between blocks."""
    return max((_given(weight, layout) for weight in model.weights), default=4)


def _given(weight: Weight, layout: Layout) -> int:
    """Bytes of an element as a layer finds it: FSDP gathers in another dtype, if it gathers."""
    return 2 if "bf16" in layout.gather and layout.shards > 1 else weight.itemsize


def check(model: Model, layout: Layout) -> None:
    """Holds a model against a layout.

    Raises:
        ValueError: tensor parallelism would cut a head, or a model without blocks; or casts are to be gathered, and no
            weight can be.
    """
    if "casts" in layout.gather and layout.shards > 1 and not any(_is_packed(w, layout) for w in model.weights):
        raise ValueError(
            "No weight can be gathered as its casts quantize it: they do not allow it (those of 'nvfp4-nvidia' and "
            "'fp8-current' do), tensor parallelism cuts it, or shards end within tiles of its scales. A run with "
            "quantize_before_gather is refused then; give --gather stored or --gather bf16."
        )
    t, decoder = layout.tensor_parallel, model.decoder
    if t == 1:
        return
    if decoder is None:
        raise ValueError("--tensor_parallel cuts the blocks of a decoder, and this model is none: leave it out.")
    for name in ("heads", "kv_heads", "intermediate"):
        if getattr(decoder, name) % t:
            raise ValueError(
                f"--tensor_parallel {t} does not divide the model's {name}, {getattr(decoder, name)}: give a divisor."
            )


# --- FLOPs and communication ------------------------------------------------------------------------------------------


def flops(model: Model, batch: Batch, layout: Layout) -> dict[str, int]:
    """FLOPs of a device in a step by arithmetic; those of attention are ``"attention"``."""
    counted = Counter[str]()
    for layer in model.layers:
        share = layout.tensor_parallel if layer.in_block else 1
        one = 2 * batch.tokens * layer.in_features * layer.out_features * batch.micro_batches // share
        again = ["fprop"] if model.checkpointing and layer.in_block else []
        for gemm in [*GEMMS, *again]:
            counted[layer.arithmetic[gemm]] += one
    if decoder := model.decoder:
        width = decoder.heads * decoder.head_dim // layout.tensor_parallel
        passes = 4 + 10 + (4 if model.checkpointing else 0)
        counted["attention"] += passes * batch.tokens * batch.length * width * decoder.blocks * batch.micro_batches
    return dict(counted)


def communication(model: Model, batch: Batch, layout: Layout) -> list[Collective]:
    """The collectives of a step, on each device."""
    check(model, layout)
    d, t, m = layout.data_parallel, layout.tensor_parallel, batch.micro_batches
    found = []
    if d > 1 and layout.strategy == "ddp":
        found.append(Collective("all_reduce", "gradients", _total(model.weights, layout), d))
    if d > 1 and layout.strategy == "fsdp":
        inside = [w for w in model.weights if w.block is not None]
        parameters = _payload(model.weights, layout) + _payload(inside, layout)
        gradients = sum(d * _local(w, w.shape, layout) * w.itemsize for w in model.weights if w.trained)
        found.append(Collective("all_gather", "parameters", m * parameters, d, t))
        found.append(Collective("reduce_scatter", "gradients", m * gradients, d, t))
    if t > 1 and model.decoder:
        forward = (3 if model.checkpointing else 2) * model.compute
        backward = model.decoder.readers * _residual(model, layout)
        payload = m * model.decoder.blocks * batch.tokens * model.decoder.hidden * (forward + backward)
        found.append(Collective("all_reduce", "activations", payload, t))
    return found


def _payload(weights: Sequence[Weight], layout: Layout) -> int:
    """Bytes of weights as they travel: rows are padded to as many on each device."""

    def bits(weight: Weight) -> float:
        return weight.packed.bits if weight.packed and _is_packed(weight, layout) else 8.0 * _given(weight, layout)

    return round(sum(layout.shards * _local(w, w.shape, layout) * bits(w) for w in weights) / 8)


def _whole(weights: Sequence[Weight], layout: Layout) -> int:
    """Bytes of weights as layers take them, when they have been gathered."""
    return sum(layout.shards * _local(w, w.shape, layout) * _given(w, layout) for w in weights)


def _is_packed(weight: Weight, layout: Layout) -> bool:
    """Whether a weight travels as codes and scales."""
    cast = weight.packed
    if "casts" not in layout.gather or cast is None or _tensor_parallel(weight, layout) > 1:
        return False
    block, rows = cast.scale.block, -(-weight.shape[0] // layout.shards)
    if isinstance(block, tuple) and ends_within(rows, weight.shape[0], block[0]):
        return False
    return operand_dtype(torch.bfloat16, cast).itemsize <= _given(weight, layout)


def times(model: Model, batch: Batch, layout: Layout, device: Device, assumed: Assumptions | None = None) -> Times:
    """Seconds of a step. Arithmetic that a device lacks runs in bf16, or in fp32 where that is what is computed in."""
    assumed = assumed or Assumptions()
    counted = Counter[str]()
    for kind, count in flops(model, batch, layout).items():
        counted[kind if kind in device.peaks else model.high] += count
    if lacking := [kind for kind in counted if kind not in device.peaks]:
        raise ValueError(f"The device has no peak for {lacking[0]}: give --peak {lacking[0]}=TFLOPS.")
    gemms = {kind: count / device.peaks[kind] / assumed.utilization for kind, count in counted.items()}
    waited = hideable = 0.0
    for each in communication(model, batch, layout):
        seconds = each.sent / each.bandwidth(device, layout.per_node) / assumed.link_utilization
        if each.of == "activations":
            waited += seconds
        else:
            hideable += seconds
    return Times(gemms, waited, hideable)
