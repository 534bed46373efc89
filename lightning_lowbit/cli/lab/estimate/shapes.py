"""The parts of a model on the meta device: weights, linear layers, decoder blocks and optimizer state."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lowbit._torch import ConvNd
from lightning_lowbit.compilation import backend
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import GEMMS, OPERANDS
from lightning_lowbit.nn.core.saving import saved_bits
from lightning_lowbit.nn.layers.classes import convertible, is_linear
from lightning_lowbit.nn.layers.composite import PartLayer
from lightning_lowbit.nn.layers.experts import UniformExperts
from lightning_lowbit.nn.layers.grouped import GroupedLayer
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.layers.registry import composite_class, quantized_class
from lightning_lowbit.precision import LowBitPrecision
from lightning_lowbit.quant import Cast

# What configurations call the number of experts that each token gets.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")

# Elements and scales (format, block) of block-scaled tensor cores: NVFP4 and MXFP4, MXFP8 and MXFP6.
_BLOCK_SCALED = {
    "fp4": ({"e2m1"}, {("e4m3", 16), ("e8m0", 32)}),
    "mxfp8": ({"e4m3", "e5m2", "e3m2", "e2m3"}, {("e8m0", 32)}),
}

# (shape, bytes of an element) of an optimizer's tensors for a parameter.
State = tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Weight:
    """A parameter; ``itemsize`` is in bytes."""

    shape: tuple[int, ...]
    itemsize: int = 4
    trained: bool = True  # whether it has a gradient
    state: State = ()
    block: str | None = None  # name of its decoder block
    matrix: bool = False  # whether it is the weight of a linear layer
    packed: Cast | None = None  # that can quantize its shards before they are gathered
    recast: bool = False  # whether the backward pass converts it again, instead of keeping a copy


@dataclass(frozen=True)
class Linear:
    """A linear layer or a stack of experts.

    ``arithmetic`` is by GEMM; ``saved`` are the bytes per element of its saved input (None: in the compute dtype),
    ``rows`` its rows for each token, in all experts together, and ``operations`` those that the host starts in both
    passes.
    """

    name: str
    out_features: int
    in_features: int
    arithmetic: Mapping[str, str]
    in_block: bool = False
    saved: float | None = None
    rows: int = 1
    operations: int = len(GEMMS)


@dataclass(frozen=True)
class Decoder:
    """The architecture of a decoder: numbers of blocks and heads, and widths in features."""

    blocks: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool = True

    @property
    def readers(self) -> int:
        return 3 + (2 if self.gated else 1)


@dataclass(frozen=True)
class Model:
    weights: Sequence[Weight]
    layers: Sequence[Linear]
    decoder: Decoder | None  # if unknown, only inputs of linear layers count as activations
    compute: int = 2  # bytes of the compute dtype
    checkpointing: bool = False  # whether blocks recompute their activations
    convolutions: int = 0  # whose FLOPs and activations are not counted

    @property
    def parameters(self) -> int:
        return sum(prod(weight.shape) for weight in self.weights)

    @property
    def high(self) -> str:
        return _high(self.compute)

    @property
    def saved(self) -> float | None:
        """Bytes per element that layers of blocks keep of their inputs, on average; None where all keep tensors."""
        layers = [layer for layer in self.layers if layer.in_block]
        if all(layer.saved is None for layer in layers):
            return None
        sizes = [layer.in_features * (self.compute if layer.saved is None else layer.saved) for layer in layers]
        return sum(sizes) / sum(layer.in_features for layer in layers)


def _high(compute: int) -> str:
    return "bf16" if compute == 2 else "fp32"


def describe(
    module: Any, plugin: LowBitPrecision | None = None, precision: str = "32-true", trainer: Any = None
) -> tuple[Model, list[str]]:
    """Describes a ``LightningModule`` on the meta device, where its optimizers step; also returns remarks.

    The plugin, or else ``precision``, gives the casts and the compute dtype. Without a linear layer: a ``ValueError``.
    """
    if plugin is None and precision in ("bf16-true", "16-true"):
        module.to(torch.bfloat16)
    compute = (plugin.compute_dtype.itemsize if plugin else 2) if plugin or "16" in precision else 4
    if not any(map(is_linear, module.modules())):
        module.configure_model()  # may create the layers
    layers = {name: layer for name, layer in module.named_modules() if is_linear(layer)}
    if not layers:
        raise ValueError(f"{type(module).__name__} has no linear layer, and formulas know nothing else to count.")
    layers |= _parts(module)
    planned = plugin.plan(module) if plugin else {}
    notes = []
    network, decoder = _find_decoder(module)
    if decoder is None:
        notes.append(
            "The model is not one decoder of transformers: of activations only inputs of linear layers are counted, "
            "each of which is taken to see every token of a batch once."
        )
    elif network.config.model_type != "llama":
        notes.append(f"Activations are those of LLaMA's block, and the model is of type {network.config.model_type}.")
    if convolutions := sum(isinstance(part, ConvNd) for part in module.modules()):
        notes.append(
            f"Of {convolutions} convolutions, weights, gradients and optimizer state are counted: their activations "
            "and FLOPs depend on the sizes of images, which a model does not tell."
        )
    if plugin is not None and plugin.attention is not None:
        high = _high(compute)
        notes.append(f"Attention's products are emulated on every device, so they count as {high}, without casts.")
    block_of = _blocks(module, decoder)
    linears, matrices, recast = [], {}, set[int]()
    for name, layer in layers.items():
        casts = planned.get(name, LinearCasts())
        *_, rows, columns = _matrix(layer).shape
        kinds = {gemm: arithmetic(casts, gemm, _high(compute)) for gemm in GEMMS}
        packs = plugin is not None and plugin.save == "codes" and casts.traits.coded is not None
        saved = saved_bits(casts, "codes", plugin.compute_dtype) / 8 if plugin is not None and packs else None
        counts = _rows(layer, network), operations(casts)
        linears.append(Linear(name, rows, columns, kinds, block_of(name) is not None, saved, *counts))
        matrices[id(layer.weight)] = _packed(layer, casts)
        if packs:
            recast.add(id(layer.weight))
    states = optimizer_state(module, trainer)
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    weights = [
        Weight(
            tuple(parameter.shape),
            parameter.itemsize,
            parameter.requires_grad,
            states.get(name, ()),
            block_of(name),
            id(parameter) in matrices,
            matrices.get(id(parameter)) if uses[id(parameter)] == 1 else None,
            id(parameter) in recast,
        )
        for name, parameter in module.named_parameters()
    ]
    checkpointing = any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
    return Model(weights, linears, decoder, compute, checkpointing, convolutions), notes


def arithmetic(casts: LinearCasts, gemm: str, high: str = "bf16") -> str:
    """Returns the arithmetic of a GEMM, a key of :attr:`Device.peaks`; ``high`` if no hardware multiplies its casts."""
    if gemm not in casts.quantized_gemms:
        return high
    if (kind := casts.native_gemms.get(gemm)) in ("fp8", "int8", "fp8-blockwise"):
        return kind
    operands = [cast for name in casts.operands_of(gemm) if (cast := casts.cast_of(name)) is not None]
    used = [cast.scale for cast in operands]
    formats = {(s.format, s.block[-1] if isinstance(s.block, tuple) else s.block) for s in used}
    for kind, (elements, scales) in _BLOCK_SCALED.items():
        if {cast.element for cast in operands} <= elements and len(formats) == 1 and formats <= scales:
            return kind
    return high


def operations(casts: LinearCasts) -> int:
    """Counts what the host starts for both passes of a layer: GEMMs, the autograd function around them, casts, amaxes
    of tensors or second levels, and rotations. On an H200 presets launched that many kernels, to within a third."""
    quantized = {operand: cast for operand in OPERANDS if isinstance(cast := getattr(casts, operand), Cast)}
    gemms = {operand: operand.partition("_")[0] for operand in quantized}
    wide = sum(
        cast.scale.needs_amax or cast.scale.block == "tensor" or cast.scale.two_level == "row"
        for cast in quantized.values()
    )
    rotated = sum(gemm in casts.hadamard for gemm in gemms.values())
    return len(GEMMS) + (2 + len(quantized) + 2 * wide + 2 * rotated if quantized else 0)


def _parts(module: nn.Module) -> dict[str, Any]:
    """Returns linear layers that are parts of composite ones, such as ``in_proj`` of ``nn.MultiheadAttention``, and
    stacks of experts, by the names of :func:`lightning_lowbit.nn.plan`."""
    products: dict[str, Any] = {}
    for name, part in convertible(module).items():
        composite = composite_class(type(part))
        layer = part if composite is None else composite.make_parts(part)[name.rpartition(".")[2]]
        if issubclass(quantized_class(type(layer)), GroupedLayer) or (composite is not None and is_linear(layer)):  # type: ignore[arg-type]
            products[name] = layer
    return products


def _rows(layer: Any, network: Any) -> int:
    """Returns the rows of a layer for each token: the number of experts that get it; 1 if that is unknown."""
    if not issubclass(quantized_class(type(layer)), GroupedLayer):  # type: ignore[arg-type]
        return 1
    owner = getattr(layer, "owner", None)
    if owner is not None and issubclass(composite_class(type(owner)), UniformExperts):  # type: ignore[arg-type]
        return len(_matrix(layer))
    config = getattr(owner, "config", None) or getattr(network, "config", None)
    return next((n for name in _CHOSEN if isinstance(n := getattr(config, name, None), int)), 1)


def _matrix(layer: Any) -> Tensor:
    cls: Any = quantized_class(type(layer))
    matrix: Tensor = cls.matrix_of(layer, layer.weight)
    return matrix


def _packed(layer: Any, casts: LinearCasts) -> Cast | None:
    """Returns the cast in which FSDP2 can gather the weight of a layer, if no other layer shares it."""
    from lightning_lowbit.nn.sharded.gather import casts_obstacle  # depends on internals of FSDP2

    is_plain = quantized_class(type(layer)).matrix_of is QuantizedLayer.matrix_of  # type: ignore[union-attr]
    is_plain = is_plain and is_linear(layer) and not isinstance(layer, PartLayer)
    return casts.cast_of("fprop_w") if is_plain and casts_obstacle(casts) is None else None


def _find_decoder(module: nn.Module) -> tuple[Any, Decoder | None]:
    """Finds the outermost ``transformers`` network in a module, and its shape; None unless there is exactly one."""
    networks: list[Any] = []
    inside: set[nn.Module] = set()
    for part in module.modules():
        if part not in inside and getattr(getattr(part, "config", None), "num_hidden_layers", None):
            networks.append(part)
            inside.update(part.modules())
    if len(networks) != 1:
        return None, None
    config = networks[0].config
    heads, hidden = config.num_attention_heads, config.hidden_size
    intermediate = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    ups = [layer for layer in networks[0].modules() if is_linear(layer) and len(_matrix(layer)) == intermediate]
    return networks[0], Decoder(
        blocks=config.num_hidden_layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocabulary=config.vocab_size,
        gated=len(ups) >= 2 * config.num_hidden_layers,
    )


def _blocks(module: nn.Module, decoder: Decoder | None) -> Callable[[str], str | None]:
    lists = {name: len(part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    lists = {name: length for name, length in lists.items() if decoder and length == decoder.blocks}

    def block_of(name: str) -> str | None:
        for blocks in lists:
            if name.startswith(f"{blocks}."):
                return f"{blocks}.{name.removeprefix(f'{blocks}.').partition('.')[0]}"
        return None

    return block_of


def optimizer_state(module: Any, trainer: Any = None) -> dict[str, State]:
    """Returns (shape, bytes of an element) of the optimizers' tensors by parameter, after a step on the meta device."""
    steps = getattr(trainer, "max_steps", None)
    total = steps if steps and steps > 0 else 1
    module.trainer = SimpleNamespace(estimated_stepping_batches=total, max_steps=steps, callbacks=[])
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    states: dict[str, State] = {}
    with torch.device("meta"), backend("eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from schedules that are created before a step
        for optimizer in _optimizers(module.configure_optimizers()):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            try:
                with torch.device("cpu"):  # for the count of steps, which optimizers of torch 2.11 create here and read
                    optimizer.step()
            except (RuntimeError, NotImplementedError) as error:
                raise ValueError(
                    f"{type(optimizer).__name__} reads numbers in its step, so its state cannot be counted here "
                    f"({str(error).splitlines()[0]}). Estimate with torch.optim.AdamW in its place."
                ) from error
            for parameter in parameters:
                state = optimizer.state.get(parameter, {}).values()
                tensors = (value for value in state if isinstance(value, Tensor))
                states[names[id(parameter)]] = tuple((tuple(value.shape), value.itemsize) for value in tensors)
                parameter.grad = None
    return states


def _optimizers(configured: Any) -> Iterator[Optimizer]:
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from _optimizers(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        for item in configured:
            yield from _optimizers(item)
