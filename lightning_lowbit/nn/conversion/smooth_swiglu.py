"""Smooth-SwiGLU: scales the input of an MLP's down projection to channels, or tokens, of one size.

A SwiGLU multiplies two projections of its input. Once their weights align, late in training, single channels of the
product leap by orders of magnitude (arXiv 2409.12517, theorem 1 and section 4.4). With one FP8 scale per tensor, a leap
saturates or makes the rest underflow. Powers of two s, made from each batch and detached, prevent this:

    h = up(x) ⊙ act(gate(x))
    channel    s = 1 / max over tokens |h|           Y = Q(s ⊙ h) · Q(W · diag(1/s))ᵀ + b
    token      s = 1 / max over channels |up(x)|     Y = Q(s · h) · Q(W)ᵀ / s + b         (what the authors' code does)

The unquantized function is unchanged to the bit. ``W · diag(1/s)`` changes with every batch, so its scale is current:
delayed scaling would move the leap into the weight. Evaluation uses the s per channel of the last training step, which
:func:`fold` can multiply into the weights.

Small blocks, such as NVFP4's, confine a leap already. Per token, where the gate leaps too, half of the leap is left.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowbit._torch import hooks_of, remove_hook
from lightning_lowbit.checks import choose
from lightning_lowbit.nn.casts.linear_casts import SMOOTHINGS, LinearCasts
from lightning_lowbit.nn.casts.traits import OPERANDS
from lightning_lowbit.nn.layers.classes import is_linear
from lightning_lowbit.nn.layers.layer import QuantizedLayer, quantized_layers
from lightning_lowbit.nn.layers.registry import quantized_class
from lightning_lowbit.quant import amax_along, smoothing_factor

_Model = TypeVar("_Model", bound=nn.Module)


class SwiGLU(Protocol):
    """A gated MLP of linear layers, ``down_proj(up_proj(x) * act(gate_proj(x)))`` with any ``act``.

    The MLPs of LLaMA, Mistral, Qwen and Gemma in ``transformers`` have these attributes. A module with other names can
    add properties, such as ``down_proj = property(lambda self: self.w2)``.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module


def swiglus(model: nn.Module) -> dict[str, Any]:
    parts, modules = ("gate_proj", "up_proj", "down_proj"), model.named_modules()
    return {name: module for name, module in modules if all(is_linear(getattr(module, part, None)) for part in parts)}


def smooth_casts(model: nn.Module, planned: Mapping[str, LinearCasts], kind: str) -> dict[str, LinearCasts]:
    """Casts of layers by name, with the down projections smoothed; a ``ValueError`` if there is none to smooth."""
    choose("kind of smooth_swiglu", kind, SMOOTHINGS)
    mlps = swiglus(model)
    if not mlps:
        raise ValueError(
            f"smooth_swiglu found no SwiGLU in {type(model).__name__}: a module with linear layers gate_proj, up_proj "
            "and down_proj. Give your own MLPs properties of these names, or leave out smooth_swiglu."
        )
    downs = {id(module.down_proj) for module in mlps.values()}
    names = [name for name, module in model.named_modules() if id(module) in downs]
    smoothed = {name: casts for name in names if (casts := _smoothed(planned.get(name), kind)) is not None}
    if not smoothed:
        quantizes = f"none of the {len(names)} down projections, e.g. {names[0]}, is quantized"
        raise ValueError(f"smooth_swiglu helps to quantize, and {quantizes}: quantize them, or leave it out.")
    return {**planned, **smoothed}


def _smoothed(casts: LinearCasts | None, kind: str) -> LinearCasts | None:
    """Adds smoothing to casts, per channel without delayed scaling of the weight; None if they quantize nothing."""
    if casts is None or not casts.quantizes_x_or_w:
        return None
    current, changes = {"source": "current", "history": 16, "algorithm": "max"}, dict[str, Any]()
    if kind == "channel":
        delayed = casts.delayed.items()
        changes = {operand: cast.replace(scale=current) for operand, cast in delayed if operand.endswith("_w")}
    return casts.replace(smooth=kind, **changes)


def smooth_swiglu(model: _Model, kind: Literal["channel", "token"] = "channel") -> _Model:
    """Smooths the input of the quantized down projections of all SwiGLU MLPs in place; returns the model.

    Args:
        model: converted; ``convert(..., smooth_swiglu=kind)`` does both.
        kind: ``"channel"``, which :func:`fold` can merge into the weights, or ``"token"``, which
            ``torch.compile(fullgraph=True)`` refuses inside an activation checkpoint.

    Raises:
        ValueError: there is no SwiGLU (see :class:`SwiGLU`), or no down projection is quantized.

    Examples:
        >>> model = smooth_swiglu(convert(llama, "fp8-current"), "token")
    """
    layers = quantized_layers(model)
    casts = smooth_casts(model, {name: layer.full_casts for name, layer in layers.items()}, kind)
    for name, layer in layers.items():
        if layer.full_casts != casts[name]:
            layer.set_casts(casts[name])
    watch_up_projections(model)
    return model


def watch_up_projections(model: nn.Module) -> None:
    """Hooks up projections to pass the amax of each token to down projections that are smoothed by tokens."""
    for module in swiglus(model).values():
        up, down = module.up_proj, module.down_proj
        for number in [number for number, hook in hooks_of(up)[1].items() if isinstance(hook, _TellTokens)]:
            remove_hook(up, number)
        if isinstance(down, QuantizedLayer) and down.full_casts.smooth == "token":
            up.register_forward_hook(_TellTokens(down))


class _TellTokens:
    def __init__(self, down: QuantizedLayer) -> None:
        self.down = down

    def __call__(self, up: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.down.casts.smooth == "token":
            output = output.detach()
            local = output.to_local() if isinstance(output, DTensor) else output  # the down projection knows the others
            self.down.lowbit.token_amax = amax_along(local, -1).reshape(-1, 1)


@torch.no_grad()
def fold(model: _Model, channel_amax: Mapping[str, Tensor] | None = None) -> _Model:
    """Merges the smoothing per channel into the weights, in place: up projections times s, down projections times 1/s.

    The model, which is returned, computes the same function without smoothing, for engines that quantize with one scale
    per tensor: to the bit where it is not quantized, or by scales of rows. Others round up projections anew.

    Args:
        model: trained with smoothing; or any model of the same layers, with ``channel_amax``.
        channel_amax: by down projection, as named in ``model``, float32 ``[channels]``: a checkpoint's
            ``["lightning_lowbit"]["channel_amax"]``. None takes the amaxes of the last training step, held by layers.

    Raises:
        ValueError: there is nothing to fold; tokens are smoothed, whose factors no weight can hold; no training step
            was taken; the amaxes are those of other layers; or an MLP is not linear in its up projection's output. The
            model is then unchanged.

    Examples:
        >>> model = fold(model, torch.load("last.ckpt")["lightning_lowbit"]["channel_amax"])
    """
    by_down = {id(module.down_proj): module for module in swiglus(model).values()}
    mlps: dict[str, Any] = {name: by_down[id(down)] for name, down in model.named_modules() if id(down) in by_down}
    if channel_amax is None:
        channel_amax = {name: amax for name, mlp in mlps.items() if (amax := _last_amax(name, mlp)) is not None}
    if not channel_amax:
        nothing = "There is nothing to fold: no MLP of the model has smoothed channels"
        raise ValueError(f"{nothing}. A model that is not converted needs the channel_amax of its checkpoint.")
    factors = {}
    for name, amax in channel_amax.items():
        if name not in mlps:
            names = ", ".join(mlps) or "none"
            raise ValueError(f"channel_amax is of {name!r}, no down projection of this model; they are: {names}.")
        down = _matrix(mlps[name].down_proj)
        if amax.shape != down.shape[1:]:
            raise ValueError(f"{name} has {down.shape[1]} channels; its channel_amax is of shape {tuple(amax.shape)}.")
        factors[name] = smoothing_factor(amax.to(down.device, torch.float32))
        _check_linear(name, mlps[name], factors[name])
    for name, s in factors.items():
        up, down = mlps[name].up_proj, mlps[name].down_proj
        _matrix(up).mul_(s[:, None])
        if up.bias is not None:
            up.bias.mul_(s)
        if isinstance(up, QuantizedLayer) and up.lowbit.amaxes is not None:
            # The amaxes in force are older than folding, which changed the weight and the output's gradient.
            up.lowbit.amaxes.in_force[[i for i, operand in enumerate(OPERANDS) if not operand.endswith("_x")]] = 0
        _matrix(down).mul_(s.reciprocal())
        if isinstance(down, QuantizedLayer):
            down.lowbit.casts = down.casts.replace(smooth=None)
            down.lowbit.full_casts = down.full_casts.replace(smooth=None)
    return model


def _matrix(layer: Any) -> Tensor:
    """Returns the weight of a linear layer, ``[out_features, in_features]``: a view."""
    cls = quantized_class(type(layer))
    assert cls is not None
    return layer.weight_matrix() if isinstance(layer, QuantizedLayer) else cls.matrix_of(layer, layer.weight)


def _last_amax(name: str, mlp: Any) -> Tensor | None:
    down = mlp.down_proj
    smooth = down.full_casts.smooth if isinstance(down, QuantizedLayer) else None
    if smooth is None:
        return None
    if smooth == "token":
        raise ValueError(f"{name} smooths tokens, each by a factor of its own, which no weight can hold.")
    if down.lowbit.amaxes is None or not down.lowbit.amaxes.channels.any():
        advice = "fold after a training step, or give the channel_amax of a checkpoint"
        raise ValueError(f"{name} has not been trained with smoothing: {advice}.")
    return down.lowbit.amaxes.channels


def _check_linear(name: str, mlp: Any, s: Tensor) -> None:
    """Raises if the down projection's input does not scale with the up projection's output."""
    layers = [*quantized_layers(mlp).values()]
    casts, modes = [layer.casts for layer in layers], [(module, module.training) for module in mlp.modules()]
    seen: list[Tensor] = []
    weight = _matrix(mlp.up_proj)
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([[1.0], [4.0], [16.0], [64.0]])  # clamps show at large numbers only
    x = x.to(weight.device, weight.dtype)
    hooks = [mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))]
    try:
        mlp.eval()  # without dropout
        for layer in layers:
            layer.casts = LinearCasts()
        with torch.autocast(x.device.type, enabled=False):
            mlp(x)
            hooks.append(mlp.up_proj.register_forward_hook(lambda _, __, output: output * s.to(output.dtype)))
            mlp(x)
    except TypeError as error:
        raise ValueError(f"{name}: its MLP must take x alone to be folded: {error}.") from None
    finally:
        for hook in hooks:
            hook.remove()
        for layer, layer_casts in zip(layers, casts, strict=True):
            layer.casts = layer_casts
        for module, training in modes:  # some may be frozen
            module.training = training
    if not torch.allclose(seen[1].float(), seen[0].float() * s, rtol=1e-2):
        why = "what enters it is not linear in the up projection's output (a norm between them?)"
        raise ValueError(f"{name}: {why}, so that its smoothing cannot be folded into the weights.")
