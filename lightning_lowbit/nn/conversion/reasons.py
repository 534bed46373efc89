"""Reasons for modules in high precision, with remedies: for tables, log lines and errors alike."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from lightning_lowbit._torch import ConvNd
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.defaults import (
    OUTPUT,
    default_reasons,
    is_left_output,
    is_router_class,
    modules_by_name,
)
from lightning_lowbit.nn.layers.classes import COMPUTED_WEIGHT, convertible, obstacle, odd_parameter, without_weight
from lightning_lowbit.nn.layers.composite import CompositeLayer
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.nn.layers.registry import converted_class
from lightning_lowbit.patterns import clean_name


@dataclass(frozen=True)
class Reason:
    """A reason for high precision, and the remedy, if there is one."""

    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}" if self.remedy else self.why


LAZY = Reason("no weight yet", "run one batch before the Trainer starts")
_LEFT_OUT = Reason("left out by skip or only")
_NOT_CONVERTED = Reason("not converted", "a LowBitPrecision among the plugins of the Trainer converts layers")
_HIGH_PRECISION = Reason("its casts are those of high precision, by preset, skip, only or overrides")
_FUNCTIONAL = Reason("computed outside of modules", "call an nn.Linear there")
_PRODUCT = Reason(
    "products of activations, as in attention, or with weights of other modules", "attention= quantizes attention's"
)
_EMBEDDING = Reason("an embedding's weight as a matrix", "an nn.Linear with that weight is quantized")
_SUBCLASS = Reason("a subclass of nn.Linear with a forward of its own", "register_linear takes it, given that forward")
_WEIGHT = Reason("no nn.Linear", "register_linear takes it for one, if it computes x · Wᵀ + b")
_STACK = Reason("a stack of matrices, as of experts, no nn.Linear", "nn.Linear and GroupedLinear are quantized")
# A product with their matrices, if any, is another module's.
WITHOUT_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, ParametrizationList)
_KINDS: dict[Any, Reason] = {
    ConvNd: Reason("a subclass of a convolution, with a forward of its own"),
    nn.MultiheadAttention: Reason("a subclass of nn.MultiheadAttention, with a forward pass of its own"),
    nn.RNNBase: Reason("recurrent"),
}


class Reasons:
    """Finds the reason for each module of a model; ``defaults`` are those of layers left out by default, by name."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = modules_by_name(model)
        layers = quantized_layers(model)
        self._rest = _LEFT_OUT if layers else _NOT_CONVERTED
        casts = [layer.full_casts for layer in layers.values() if layer.full_casts != LinearCasts()]
        usual = max(casts, key=casts.count, default=LinearCasts())
        rest = {name: usual for name in convertible(model) if name not in layers or layers[name].full_casts != usual}
        self.defaults = {clean_name(name): why for name, why in default_reasons(model, rest).items()}
        self.defaults |= {name: OUTPUT for name, module in self._modules.items() if is_left_output(module)}

    def of(self, name: str) -> Reason:
        """Returns the reason for a name of ``Coverage.uncovered``."""
        module_name, _, gemm = name.partition(" (")
        module = self._modules.get(module_name)
        if not module_name or module is None:
            return _FUNCTIONAL
        if gemm:
            return Reason(f"its casts leave {gemm.rstrip(')')} in high precision")
        if isinstance(module, CompositeLayer):  # its own products; those with weights are its parts'
            return _PRODUCT
        return self.module_reason(module_name, module) or _PRODUCT

    def module_reason(self, name: str, module: nn.Module) -> Reason | None:
        """Returns the reason for a module's own weights; None if they are quantized."""
        if isinstance(module, QuantizedLayer) and module.full_casts != LinearCasts():
            return None
        if isinstance(module, CompositeLayer):
            return _HIGH_PRECISION if module.is_high_precision else None
        if name in self.defaults:
            is_output = self.defaults[name] == OUTPUT
            remedy = "quantize_output=True quantizes it" if is_output else "name it in overrides or only to quantize it"
            return Reason(self.defaults[name], remedy)
        if isinstance(module, QuantizedLayer):
            return _HIGH_PRECISION
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            return _EMBEDDING
        cls: Any = type(module)
        return class_reason(module) or (None if converted_class(cls) is None else self._rest)


def class_reason(module: Any) -> Reason | None:
    """Returns why a module is not converted; None for modules without a matrix."""
    if without_weight(module):
        return LAZY
    cls: Any = type(module)
    if converted_class(cls) is not None:
        blocked = obstacle(module)
        return None if blocked is None else Reason(blocked)
    if isinstance(module, WITHOUT_PRODUCTS):
        return None
    if is_parametrized(module):
        return Reason(COMPUTED_WEIGHT)
    matrices = [parameter for parameter in module.parameters(recurse=False) if is_matrix(parameter)]
    for kind, reason in _KINDS.items():
        if isinstance(module, kind):
            return reason
    if is_router_class(type(module)):
        return Reason("a router of experts")
    if matrices and (odd := odd_parameter(module)) is not None:
        return Reason(odd)
    if isinstance(module, nn.Linear):
        return _SUBCLASS
    if any(name.startswith("lora_") for name, _ in module.named_parameters(recurse=False)):
        return Reason("an adapter")
    if any(parameter.dim() == 3 for parameter in matrices) and not isinstance(module, nn.Bilinear):
        return _STACK
    if any(parameter.dim() == 2 and parameter is getattr(module, "weight", None) for parameter in matrices):
        return _WEIGHT
    return Reason("no nn.Linear") if matrices else None


def is_matrix(parameter: Tensor) -> bool:
    return parameter.dim() > 1 and parameter.shape[0] > 1  # not a position embedding [1, tokens, features]
