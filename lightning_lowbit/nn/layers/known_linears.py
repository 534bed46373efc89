"""Classes that compute ``x · Wᵀ + b`` under any name, and the classes that they are converted to.

nn.Linear, and subclasses of it that inherit its forward        by themselves
transformers' Conv1D and FalconLinear, torch_geometric's …      by module and name, so that nothing is imported
any other class                                                 by :func:`register_linear`
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_lowbit.checks import choose
from lightning_lowbit.nn.core.inputs import check_inputs
from lightning_lowbit.nn.core.parallel import tensor_parallel
from lightning_lowbit.nn.layers.layer import QuantizedLayer, QuantLinear
from lightning_lowbit.nn.layers.registry import converted_class, derived, kind

ROWS, COLUMNS = "[out, in]", "[in, out]"  # how a weight is stored

Forward = Callable[..., Any]


class _Layer(NamedTuple):
    """Describes a class of linear layers: how it stores its weight, and its forward pass beyond the product."""

    weight: str = ROWS
    forward: Forward | None = None


def _decoupled(layer: Any, multiply: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    output = multiply(input)
    return output if layer.out_additional_features == 0 else torch.cat((output, layer.additional_fc(input)), -1)


_REGISTERED: dict[type, _Layer] = {}
_KNOWN: dict[tuple[str, str], _Layer] = {
    ("transformers.pytorch_utils", "Conv1D"): _Layer(COLUMNS),
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"): _Layer(),
    ("transformers.models.idefics.modeling_idefics", "IdeficsDecoupledLinear"): _Layer(forward=_decoupled),
    ("torch_geometric.nn.dense.linear", "Linear"): _Layer(),
    ("timm.layers.linear", "Linear"): _Layer(),
}


def register_linear(cls: type[nn.Module], weight: str = ROWS, forward: Forward | None = None) -> None:
    """Lets conversion take a class of modules for linear layers, beside ``nn.Linear``; subclasses are not included.

    Call it where the class is defined: a file that a YAML names is imported before the model is converted. Models that
    are converted already stay as they are. While nothing is quantized, the class's own forward runs.

    Args:
        cls: a class of modules with a parameter ``weight``, of two dimensions, and perhaps ``bias`` ``[out]``.
        weight: how the weight is stored: ``"[out, in]"``, as in ``nn.Linear``, or ``"[in, out]"``.
        forward: ``(layer, multiply, *args, **kwargs)``, for a class whose forward is more than ``x · Wᵀ + b``:
            ``multiply(x)`` is that product, quantized, of ``x`` ``[..., in]``. None: the product of the only argument.

    Raises:
        ValueError: ``cls`` is no class of modules, or one that is converted in another way; an unknown order;
            ``forward`` cannot be called; the class is registered already, otherwise.

    Examples:
        >>> from torch import nn
        >>> class Scaled(nn.Linear):
        ...     def forward(self, x):
        ...         return 0.5 * super().forward(x)
        >>> register_linear(Scaled, forward=lambda layer, multiply, x: 0.5 * multiply(x))
    """
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise ValueError(f"register_linear takes a class of modules, such as MyLinear; got {cls!r}.")
    choose("order of a weight", weight, (ROWS, COLUMNS))
    if forward is not None and not callable(forward):
        raise ValueError(f"forward is a function (layer, multiply, *args, **kwargs), or None; got {forward!r}.")
    layer, former = _Layer(weight, forward), _REGISTERED.get(cls)
    if former is not None and former != layer:
        raise ValueError(f"{cls.__name__} is registered already, with {_shown(former)}; got {_shown(layer)}.")
    if former is None and _by_itself(cls) is not None:
        raise ValueError(f"{cls.__name__} is converted without being registered: leave out register_linear.")
    _REGISTERED[cls] = layer
    converted_class.cache_clear()


def _shown(layer: _Layer) -> str:
    return f"weight={layer.weight!r}, forward={layer.forward!r}"


def check_registered(layer: nn.Module) -> None:
    """Raises a ``ValueError`` for a layer of a registered class without a weight of two dimensions."""
    cls, weight = type(layer), getattr(layer, "weight", None)
    if cls in _REGISTERED and not (isinstance(weight, Tensor) and weight.dim() <= 2):  # FSDP1 flattens weights
        got = f"one {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"{type(weight).__name__}"
        raise ValueError(
            f"{cls.__name__} is registered as a linear layer, which has a weight of two dimensions; got {got}."
        )


@kind
def linear_class(cls: Any) -> type[QuantizedLayer] | None:
    """Returns the class that linear layers of exactly this class are converted to; None for other classes."""
    known = _REGISTERED.get(cls) or _KNOWN.get((cls.__module__, cls.__name__))
    return _by_itself(cls) if known is None else _derived(cls, known)


def _by_itself(cls: Any) -> type[QuantizedLayer] | None:
    if cls is nn.Linear:
        return QuantLinear
    # MultiheadAttention uses a layer of the first class without calling it, and lazy layers have no weight yet.
    if not issubclass(cls, nn.Linear) or issubclass(cls, (NonDynamicallyQuantizableLinear, LazyModuleMixin)):
        return None
    is_linear = cls.forward is nn.Linear.forward and not hasattr(cls, "weight") and not hasattr(cls, "bias")
    return derived(QuantizedLayer, cls) if is_linear else None


def _derived(cls: Any, known: _Layer) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if self.lowbit.casts.traits.is_empty or (isinstance(x, Tensor) and x.device.type == "meta"):
            return cls.forward(self, *args, **kwargs)
        return quantized(self, partial(_multiply, self), *args, **kwargs)

    quantized = _product_alone if known.forward is None else known.forward
    members: dict[str, Any] = {"forward": forward}
    if known.weight == COLUMNS:
        members["matrix_of"] = lambda self, weight: weight.t()
    if not issubclass(cls, nn.Linear):
        members["__repr__"] = nn.Module.__repr__  # with the casts
    if hasattr(cls, "__deepcopy__"):  # which may construct the class itself
        members["__deepcopy__"] = lambda self, memo: _copied(self, cls.__deepcopy__(self, memo), memo)
    return derived(QuantizedLayer, cls, **members)


def _copied(layer: Any, twin: Any, memo: Any) -> Any:
    twin.__class__ = type(layer)
    twin.lowbit = copy.deepcopy(layer.lowbit, memo).for_copy()
    return twin


def _product_alone(layer: Any, multiply: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if len(args) + len(kwargs) != 1:
        raise ValueError(
            f"{type(layer).__name__} is registered as a linear layer, whose forward takes one tensor; got "
            f"{len(args) + len(kwargs)} arguments. Say what it does with them: register_linear(cls, forward=...)."
        )
    return multiply(*args, *kwargs.values())


def _multiply(layer: Any, x: Tensor) -> Tensor:
    check_inputs(layer, x)
    weight, bias = layer.weight_matrix(), getattr(layer, "bias", None)
    bias = bias if isinstance(bias, Tensor) else None  # of some classes it is a flag
    if isinstance(weight, DTensor):
        return tensor_parallel(layer.quantized_forward, x, weight, bias)
    product: Tensor = layer.quantized_forward(x, weight, bias)
    return product
