"""Turns the linear layers of any model into quantized ones."""

import warnings
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_lowbit.checks import choose, number, some
from lightning_lowbit.nn.attention.modules import attending, convert_attention, is_attention, other_attention
from lightning_lowbit.nn.attention.products import casts_of_attention, check_attention
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import GEMMS, OPERANDS_OF
from lightning_lowbit.nn.conversion.context import ForwardContext
from lightning_lowbit.nn.conversion.defaults import default_reasons, drop_named, mark_outputs, output_layers
from lightning_lowbit.nn.conversion.names import Names
from lightning_lowbit.nn.conversion.reasons import LAZY, class_reason
from lightning_lowbit.nn.conversion.smooth_swiglu import smooth_casts, watch_up_projections
from lightning_lowbit.nn.core.saving import Readers, check_save
from lightning_lowbit.nn.layers.classes import convert_layer, convertible, kind_of, without_weight
from lightning_lowbit.nn.layers.grouped import grouping_obstacle
from lightning_lowbit.nn.layers.layer import check_smoothing, quantized_layers
from lightning_lowbit.nn.layers.native import BACKENDS, first_kind
from lightning_lowbit.patterns import clean_name, select

# Mapping before LinearCasts: a command line takes the first type that fits, and LinearCasts would fill in defaults.
CastsLike = str | Mapping[str, Any] | LinearCasts
# How the products of a stack of experts are multiplied: as the backend has it, or by one GEMM for all of them.
GROUPED = ("auto", "native")
_Model = TypeVar("_Model", bound=nn.Module)


def convert(
    model: _Model,
    casts: CastsLike,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
    overrides: Mapping[str, CastsLike] | None = None,
    exact: bool = False,
    backend: str = "auto",
    smooth_swiglu: str | None = None,
    save: str = "inputs",
    attention: CastsLike | None = None,
    grouped: str = "auto",
) -> _Model:
    """Quantizes the matrix products of a model's layers in place, and returns the model.

    Each layer changes its class: ``nn.Linear``, subclasses that inherit its forward, other linear layers that are known
    by name, those of ``register_linear``, convolutions, stacks of experts, and ``nn.MultiheadAttention``. Names in
    ``state_dict``, parameters and references stay the same. Converting again replaces the casts. Routers, adapters and
    narrow layers stay in high precision unless a pattern of ``only`` or ``overrides`` names them, see
    :mod:`lightning_lowbit.nn.conversion.defaults`.

    Args:
        model: any module.
        casts: of all layers without an override: :class:`LinearCasts`, a preset's name, or a mapping of fields.
        skip: patterns of layers to leave alone, see :mod:`lightning_lowbit.patterns`.
        only: patterns of the layers to convert; None for all.
        overrides: other casts by pattern; the first pattern that matches a layer holds.
        exact: GEMMs in float32 over exact operands, rounded once: a slow reference for the emulation.
        backend: ``"auto"`` runs GEMMs of FP8, integers, NVFP4, MXFP4 and MXFP8 natively where the device can (see
            :mod:`lightning_lowbit.nn.native`), and emulates the others; ``"emulated"`` emulates all; ``"native"``
            refuses to emulate.
        smooth_swiglu: ``"channel"`` or ``"token"``, see :mod:`lightning_lowbit.nn.conversion.smooth_swiglu`.
        save: ``"inputs"`` keeps the input of layers for the backward pass, ``"codes"`` codes and scales of its
            quantized operand, with the same gradients.
        attention: casts of attention's two products, Q · Kᵀ and P · V, named ``qk`` and ``pv`` in each module that
            calls ``F.scaled_dot_product_attention``; None leaves them in high precision. ``skip``, ``only`` and
            ``overrides`` hold for them, too. See :mod:`lightning_lowbit.nn.attention`.
        grouped: ``"native"`` multiplies all experts of a stack by one bf16 GEMM of torch's, which rounds once more
            where there are scales of tensors or rows, or a bias (:mod:`lightning_lowbit.nn.native.grouped`); ``"auto"``
            one expert after the other, or on CPUs as ``backend`` has it.

    Raises:
        ValueError: a pattern matches no layer, or no layer is left to convert; an unknown backend, or a native one that
            the casts do not have; no SwiGLU to smooth; codes that the casts do not have; no attention, or casts that it
            cannot have; no stack for grouped GEMMs, or one that they do not serve. The model is then unchanged.

    Examples:
        >>> convert(model, "nvfp4", skip=["lm_head"], overrides={"layers.0": "fp8-current"})
    """
    planned = plan(model, casts, skip, only, overrides, smooth_swiglu, attention)
    check_backend(planned, backend, exact, grouped=grouped)
    return convert_layers(model, planned, exact, backend, save, grouped)


def convert_layers(
    model: _Model, planned: Mapping[str, LinearCasts], exact: bool, backend: str, save: str, grouped: str
) -> _Model:
    """Converts the layers of ``planned`` (casts by name in the model) in place; the others go to high precision."""
    if grouped == "native":
        _check_stacks(model, planned)
    check_save(planned, save)
    readers, before = Readers() if save == "codes" else None, quantized_layers(model)
    _check_casts(model, {**dict.fromkeys(before, LinearCasts()), **planned})
    ForwardContext.detach(model)  # of casts that it had before
    mark_outputs(model, ())
    for name, former in before.items():
        if name not in planned:  # converted before, and to be left alone now
            former.set_casts(LinearCasts())
    for name, layer_casts in planned.items():
        layer = convert_attention(model, name) if is_attention(name) else convert_layer(model, name)
        layer.set_casts(layer_casts)
        state = layer.lowbit
        state.exact, state.backend, state.save, state.grouped = exact, backend, save, grouped
        state.readers, state.keeps_input = readers, False
    _prepare(model)
    return model


def convert_more(model: nn.Module, planned: Mapping[str, LinearCasts]) -> None:
    """Converts the layers of ``planned`` in place; other layers, and the settings of converted ones, stay."""
    _check_casts(model, planned)
    for name, layer_casts in planned.items():
        convert_layer(model, name).set_casts(layer_casts)
    _prepare(model)


def _check_casts(model: nn.Module, planned: Mapping[str, LinearCasts]) -> None:
    """Raises a ``ValueError``, before anything changes, for casts that a layer cannot have, converted or not."""
    modules, layers = convertible(model), quantized_layers(model)
    for name, casts in planned.items():
        if name in layers:
            layers[name].check_casts(casts)
        elif not is_attention(name):
            check_smoothing(clean_name(name), kind_of(modules, name), casts)


def _prepare(model: nn.Module) -> None:
    """Prepares the modules around converted layers."""
    watch_up_projections(model)
    if lazy := [clean_name(name) for name, module in model.named_modules() if without_weight(module)]:
        warnings.warn(f"{some(lazy)}: {LAZY}. It is left in high precision.", stacklevel=2)
    for module in model.modules():
        # In evaluation torch would run these blocks as one fused operation on the raw weights, unless this flag is 0.
        if isinstance(module, nn.TransformerEncoderLayer) and quantized_layers(module):
            module.activation_relu_or_gelu = 0
        # For that operation it would give its layers a nested tensor where there is padding.
        if isinstance(module, nn.TransformerEncoder) and quantized_layers(module):
            module.use_nested_tensor = False


def casts_by_pattern(overrides: Mapping[str, CastsLike] | None) -> dict[str, LinearCasts]:
    """Makes casts by name pattern; a ``ValueError`` for a value that is no mapping."""
    if not isinstance(overrides, Mapping | None):
        raise ValueError(f"overrides maps name patterns to casts, such as {{'lm_head': 'mxfp8'}}; got {overrides!r}.")
    return {pattern: LinearCasts.of(value) for pattern, value in (overrides or {}).items()}


def plan(
    model: nn.Module,
    casts: CastsLike,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
    overrides: Mapping[str, CastsLike] | None = None,
    smooth_swiglu: str | None = None,
    attention: CastsLike | None = None,
    quantize_output: bool = True,
) -> dict[str, LinearCasts]:
    """Returns the casts that :func:`convert` would give each layer, by name. Arguments and errors are the same.

    ``quantize_output=False`` leaves out the layers that :func:`output_layers` finds, unless a pattern names them or no
    other layer is left.
    """
    selection = Selection(model, casts, skip, only, overrides, attention)
    return selection.planned(selection.excluded if quantize_output else selection.excluded_with_outputs, smooth_swiglu)


class Selection:
    """The layers of a model that patterns select, as arguments of :func:`convert`; errors are the same. ``casts`` has
    all of these by name, ``excluded`` those that stay in high precision by default, but for output layers."""

    def __init__(
        self,
        model: nn.Module,
        casts: CastsLike,
        skip: Iterable[str] = (),
        only: Iterable[str] | None = None,
        overrides: Mapping[str, CastsLike] | None = None,
        attention: CastsLike | None = None,
    ) -> None:
        self._model, self._modules = model, _convertible(model)
        products = {} if attention is None else attending(model)
        default = LinearCasts.of(casts)
        product_default = default if attention is None else casts_of_attention(attention)
        if attention is not None and not products:
            raise ValueError(
                f"attention={product_default} needs modules that call F.scaled_dot_product_attention, in a method or "
                f"through transformers' interface (attn_implementation='sdpa'); {type(model).__name__} has none. Leave "
                "it out."
            )
        self._layers, others = Names(model, [*self._modules, *products]), casts_by_pattern(overrides)
        matched = partial(select, self._layers, left=self._other_modules)
        skipped, chosen = matched(skip, "skip"), self._layers if only is None else matched(only, "only")
        self._patterns = [*(only or ()), *others]
        self.casts = {
            name: product_default if name in products else default
            for name in self._layers
            if name in chosen and name not in skipped
        }
        usual = set(self.casts)
        for pattern, layer_casts in others.items():
            names = matched([pattern], "overrides")
            if not names & usual:
                raise ValueError(
                    f"overrides: {pattern!r} gives no layer its casts. It names {some(sorted(names))}; skip or only "
                    "leave these out, or an earlier pattern names them. Leave it out, or put it first."
                )
            self.casts |= dict.fromkeys(names & usual, layer_casts)
            usual -= names
        check_planned_attention(self.casts, products)
        if products and not products.keys() & self.casts.keys():
            raise ValueError(
                f"attention={product_default}: skip and only leave none of {some(products)}. Leave it out."
            )
        summary = f"No layer is left to quantize: {len(self._layers)} were found, e.g. {some(self._layers)}"
        if not self.casts:
            raise ValueError(f"{summary}, and skip and only leave none. Skip fewer layers.")
        linear = {name: layer_casts for name, layer_casts in self.casts.items() if not is_attention(name)}
        self._reasons = default_reasons(model, linear)
        self.excluded = drop_named(self._reasons.keys(), self._layers, self._patterns)
        if self.excluded >= self.casts.keys():
            reasons = some(f"{name} ({reason})" for name, reason in self._reasons.items())
            raise ValueError(
                f"{summary}, and by default these stay in high precision: {reasons}. Name them in only or overrides to "
                "quantize them."
            )

    def _other_modules(self) -> dict[str, str]:
        """Says why other modules than the layers stay in high precision, by name."""
        modules = {name: module for name, module in self._model.named_modules() if name not in self._layers}
        reasons = {name: class_reason(module) for name, module in modules.items()}
        what = "which stays in high precision"
        return {clean_name(name): f"{what}: {reason}" for name, reason in reasons.items() if reason is not None}

    @property
    def excluded_with_outputs(self) -> set[str]:
        """``excluded``, and the output layers: unless patterns name them, or no other layer is left."""
        outputs = {name for name in output_layers(self._model, self._modules) if name in self.casts}
        excluded = drop_named(outputs | self._reasons.keys(), self._layers, self._patterns)
        return excluded - (outputs - self._reasons.keys()) if excluded >= self.casts.keys() else excluded

    def planned(self, excluded: Collection[str], smooth_swiglu: str | None) -> dict[str, LinearCasts]:
        """Returns the casts by name without some layers, with down projections smoothed if asked for."""
        result = {name: layer_casts for name, layer_casts in self.casts.items() if name not in excluded}
        if smooth_swiglu is None:
            return result
        linear = {name: layer_casts for name, layer_casts in result.items() if not is_attention(name)}
        return result | smooth_casts(self._model, linear, smooth_swiglu)


def _convertible(model: Any) -> dict[str, nn.Module]:
    """Returns the layers of a model by name; a ``ValueError`` if there are none."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"A model is an instance of nn.Module; got {model!r}.")
    if layers := convertible(model):
        return layers
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        if (reason := class_reason(module)) is not None:
            kinds.setdefault(f"{type(module).__name__} ({reason})", clean_name(name))
    others = some(f"{kind}, such as {name}" if name else kind for kind, name in kinds.items())
    raise ValueError(
        f"{type(model).__name__} holds no layer to quantize: no linear layer, convolution, stack of experts or "
        f"nn.MultiheadAttention. {f'It has {others}. ' if others else ''}"
        "Layers that are created in configure_model must exist when the Trainer sets up the strategy."
    )


def check_planned_attention(planned: Mapping[str, LinearCasts], products: Mapping[str, nn.Module]) -> None:
    """Raises a ``ValueError`` for attention that is computed otherwise, or casts that its products cannot have."""
    for name, module in products.items():
        if planned.get(name, LinearCasts()) == LinearCasts():
            continue
        check_attention(clean_name(name), planned[name])
        if (how := other_attention(module)) is not None:
            raise ValueError(
                f"attention: {clean_name(name).rpartition('.')[0]} computes attention by {how!r}, and only "
                "F.scaled_dot_product_attention can be quantized. Load the model with attn_implementation='sdpa', or "
                "leave such modules, or attention, out."
            )


def _check_stacks(model: nn.Module, planned: Mapping[str, LinearCasts]) -> None:
    """Raises a ``ValueError`` where the layers of ``planned`` hold no stack, or one that grouped GEMMs do not serve."""
    modules = convertible(model)
    stacks = {name: casts for name, casts in planned.items() if name in modules and kind_of(modules, name) == "experts"}
    if not stacks:
        raise ValueError(
            "grouped='native' is for stacks of experts, and none is among the layers to convert. Leave it out."
        )
    check_grouped_casts(stacks)


def check_grouped_casts(stacks: Mapping[str, LinearCasts]) -> None:
    """Raises a ``ValueError`` for the casts of a stack, by name, that grouped GEMMs do not serve."""
    for name, casts in stacks.items():
        if (reason := grouping_obstacle(casts)) is not None:
            raise ValueError(
                f"grouped='native' does not serve the casts of {clean_name(name) or 'the stack'}: {reason}, leave the "
                "stack out by skip, or leave grouped out."
            )


def plan_by_name(model: nn.Module, casts: Mapping[str, LinearCasts]) -> dict[str, LinearCasts]:
    """Casts of a model's layers by the clean names of a checkpoint; a ``ValueError`` if it has no layer of a name."""
    layers = {clean_name(name): name for name in [*convertible(model), *attending(model)]}
    if missing := [name for name in casts if name not in layers]:
        raise ValueError(
            f"Casts are given for {len(missing)} layers that {type(model).__name__} does not have, e.g. "
            f"{some(missing)}; it has {some(layers) or 'no linear layer'}. Build the model as it was trained."
        )
    return {layers[name]: casts[name] for name in casts}


def check_backend(
    planned: Mapping[str, LinearCasts],
    backend: str,
    exact: bool = False,
    device: torch.device | None = None,
    grouped: str = "auto",
) -> None:
    """Raises a ``ValueError`` for an unknown backend, or one that the casts of a layer, the device or other settings do
    not support."""
    choose("backend", backend, BACKENDS)
    if choose("grouped", grouped, GROUPED) == "native" and (exact or backend == "native"):
        other = "exact=True" if exact else "backend='native'"
        raise ValueError(
            f"grouped='native' multiplies the products of experts in bfloat16, and {other} does not: choose one."
        )
    if backend != "native":
        return
    if exact:
        raise ValueError("exact emulates GEMMs, and backend='native' does not: choose one of them.")
    if attended := [name for name in planned if is_attention(name) and planned[name] != LinearCasts()]:
        raise ValueError(
            f"backend='native', but attention's products, such as {clean_name(attended[0])}, have no native GEMM. Use "
            "backend='auto', or leave out attention."
        )
    every = [(name, casts, gemm) for name, casts in planned.items() for gemm in GEMMS]
    quantized = [(name, casts, gemm) for name, casts, gemm in every if casts.has_cast(OPERANDS_OF[gemm])]
    if lacking := [(name, gemm) for name, casts, gemm in quantized if gemm not in casts.native_gemms]:
        (name, gemm), names = lacking[0], dict.fromkeys(name or "the casts" for name, _ in lacking)
        raise ValueError(
            f"backend='native', but {gemm} of {some(names)} has no native GEMM: "
            "those take E4M3 or E5M2 (not E5M2 twice), or integers, with scales per tensor or row; E2M1 with blocks of "
            "16 (E4M3) or 32 (E8M0); or E4M3 with blocks of 32 (E8M0) or 128 (fp32); on CPUs elements of up to 4 bits "
            "with any scales of blocks of 16 or a multiple; of both operands. Got "
            f"{planned[name]}. Use backend='auto', skip such layers, or give them other casts with overrides."
        )
    if device is not None:
        for kinds in {casts.traits.native_kinds[gemm] for _, casts, gemm in quantized}:
            kind, reason, remedy = first_kind(device, kinds, backend)
            if kind is None:
                raise ValueError(f"backend='native': {reason}. {remedy}")


def set_phase(model: nn.Module, phase: str) -> None:
    """Puts all converted layers into a phase, see :meth:`LinearCasts.phase`; an unknown one is a ``ValueError``."""
    for layer in quantized_layers(model).values():
        layer.casts = layer.full_casts.phase(phase)


def set_blend(model: nn.Module, blend: float | Tensor | None) -> None:
    """Sets the annealing factor λ of all converted layers: each operand that has a cast is ``x + λ (q(x) - x)``.

    While λ is set, operands are dense tensors of the compute dtype, and no GEMM is native.

    Args:
        model: converted.
        blend: λ in [0, 1]: a number, or a 0-d float32 tensor on the layers' device, which may change in place without
            recompilation; 1 or None for full quantization. Anything else is a ``ValueError``.
    """
    if isinstance(blend, Tensor):
        if blend.shape != () or blend.dtype != torch.float32:
            shape = tuple(blend.shape)
            raise ValueError(f"blend is a number or a 0-d float32 tensor; got {blend.dtype} of shape {shape}.")
        check_blend(blend.item())
    elif blend is not None:
        blend = None if check_blend(blend) == 1 else float(blend)
    layers = quantized_layers(model).values()
    devices = {layer.device for layer in layers}
    if isinstance(blend, Tensor) and devices - {blend.device}:
        names = ", ".join(map(str, devices))
        raise ValueError(f"blend is a tensor on the device of the layers, {names}; got one on {blend.device}.")
    factors = {device: torch.tensor(blend, device=device) if isinstance(blend, float) else blend for device in devices}
    for layer in layers:
        layer.lowbit.blend = factors[layer.device]


def check_blend(blend: float) -> float:
    what = "λ, how far operands are quantized: 0 for high precision, 1 for full quantization"
    return number("blend", blend, what, at_least=0, at_most=1)
