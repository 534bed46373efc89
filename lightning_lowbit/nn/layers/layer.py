"""Linear layers whose GEMMs are quantized.

:func:`lightning_lowbit.convert` turns an ``nn.Linear`` into a ``QuantLinear`` in place by assigning its ``__class__``:
parameters, their names and all references to the module stay valid.
"""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_lowbit._torch import unsafe_view
from lightning_lowbit.distributed import whole_shape
from lightning_lowbit.kernels.windows import Window
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.core.calls import keys_of_call
from lightning_lowbit.nn.core.function import How, QuantizedGemms
from lightning_lowbit.nn.core.gemm import no_autocast
from lightning_lowbit.nn.core.inputs import COMPUTED, check_inputs, nested_product, refuse_dtypes, refuse_scripts
from lightning_lowbit.nn.core.operands import Amaxes, Pass
from lightning_lowbit.nn.core.parallel import WHOLE, Shards, tensor_parallel
from lightning_lowbit.nn.core.saving import Frozen, saved_bits
from lightning_lowbit.nn.core.watch import LayerAmaxes, amax_in_force, stage_, watched
from lightning_lowbit.nn.layers.native import NativeGemms
from lightning_lowbit.nn.layers.state import FORMER, LayerState, split_former
from lightning_lowbit.quant import amax_along, smoothing_factor
from lightning_lowbit.quant.scales import inverse
from lightning_lowbit.quant.shard import amax_of, max_over_shards

_NOTHING = nullcontext()

# How each layer computed its last pass, and the arguments of that. A copy of a layer, or a pickled one, has none.
_HOWS: WeakKeyDictionary[Any, tuple[How, Any, Any]] = WeakKeyDictionary()
_COMPILED: list[bool] = []  # an entry for each layer that was compiled in this process: others may share its graph


class QuantizedLayer(NativeGemms):
    """Base class of converted layers.

    Attributes:
        lowbit: all that conversion adds to a module; it is in no ``state_dict``.
        kind: ``"linear"``, ``"convolution"``, ``"experts"`` or ``"attention"``.
        keeps_parameter: with ``save="codes"``: the weight is the parameter, or a view of it.
    """

    kind: ClassVar[str] = "linear"
    keeps_parameter: ClassVar[bool] = True

    weight: Any  # as nn.Linear and Conv1D declare it
    bias: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lowbit = LayerState()

    def __setstate__(self, state: Any) -> None:
        """Restores a copy, or a layer that was pickled."""
        attributes, lowbit = split_former(state)
        super().__setstate__(attributes)  # type: ignore[no-untyped-call]
        self.lowbit = lowbit.for_copy()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; one of earlier versions is set where it is now, with a warning."""
        if name in FORMER and not hasattr(self, name):
            warnings.warn(f"A converted layer's {name} is now lowbit.{FORMER[name]}.", DeprecationWarning, stacklevel=2)
            setattr(self.lowbit, FORMER[name], value)
        else:
            super().__setattr__(name, value)

    @property
    def casts(self) -> LinearCasts:
        """The casts in force."""
        return self.lowbit.casts

    @casts.setter
    def casts(self, casts: LinearCasts) -> None:
        self.lowbit.casts = casts

    @property
    def full_casts(self) -> LinearCasts:
        """The casts outside any phase; see :meth:`set_casts`."""
        return self.lowbit.full_casts

    @property
    def name_in_model(self) -> str:
        """The layer's name in errors: that in the converted model, or its class and shape."""
        return self.lowbit.name_in_model

    def check_casts(self, casts: LinearCasts) -> None:
        """Raises a ``ValueError`` for casts that the layer cannot have."""
        frozen, name = self.lowbit.frozen, self.name_in_model
        check_smoothing(name, self.kind, casts)
        if frozen is not None and casts.fprop_w not in (None, frozen.cast):
            raise ValueError(
                f"The weight of {name} is kept as codes of {frozen.cast}, and the casts quantize it to "
                f"{casts.fprop_w}. Give the layer casts with the same fprop_w, or call "
                "lightning_lowbit.unpack_frozen(model) first."
            )

    def set_casts(self, casts: LinearCasts) -> None:
        """Sets the casts outside any phase. A change drops amaxes, which may be those of other operands."""
        self.check_casts(casts)
        state = self.lowbit
        if casts != state.full_casts:
            state.amaxes = None
        state.full_casts = state.casts = casts

    def weight_matrix(self) -> Tensor:
        """Returns the weight as ``[out_features, in_features]``, or a stack of such matrices."""
        frozen = self.lowbit.frozen
        return self.matrix_of(self.weight) if frozen is None else frozen.dense(self.weight.detach())

    def matrix_of(self, weight: Tensor) -> Tensor:
        """Returns a weight, as it is stored, in the order of :meth:`weight_matrix`; also for layers that are not
        converted."""
        return weight

    @property
    def matrix_shape(self) -> torch.Size:
        """The shape of :meth:`weight_matrix`, also of a whole weight that FSDP1 has flattened."""
        frozen = self.lowbit.frozen
        return frozen.shape if frozen else self.matrix_of(torch.empty(whole_shape(self.weight), device="meta")).shape

    def set_weight_matrix(self, values: Tensor) -> None:
        """Writes values of :meth:`weight_matrix` to the parameter."""
        self.weight_matrix().detach().copy_(values)

    @staticmethod
    def obstacle(module: Any) -> str | None:
        """Returns why a module of a class that can be converted stays in high precision, if it does."""
        return None

    @property
    def size_text(self) -> str:
        """The layer's size in tables: ``in → out`` features, or ``8 × (in → out)`` of a stack."""
        *stack, out_features, in_features = self.matrix_shape
        size = f"{in_features} → {out_features}"
        return f"{stack[0]} × ({size})" if stack else size

    def saved_input(self, dtype: torch.dtype) -> tuple[int, float]:
        """Returns the elements of an input token, and the bits of each that a pass in ``dtype`` saves for backward."""
        return self.matrix_shape[-1], saved_bits(self.lowbit.full_casts, self.lowbit.save, dtype)

    def own_parameters(self) -> list[nn.Parameter]:
        """Returns the layer's parameters, wherever they are registered."""
        return list(self.parameters(recurse=False))

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def name_in_errors(self) -> str:
        """:attr:`name_in_model`, except in compiled graphs, which the blocks of a model share."""
        return "(compiled)" if torch.compiler.is_compiling() else self.lowbit.name_in_model

    def __prepare_scriptable__(self) -> Any:  # torch.jit.script asks for it
        refuse_scripts(self.name_in_model)

    def forward(self, input: Tensor) -> Tensor:  # as nn.Linear names it, which callers may do too
        """Computes ``x · Wᵀ + b`` for ``x`` ``[..., in_features]``; under autocast in its dtype."""
        casts, frozen = self.lowbit.casts, self.lowbit.frozen
        if casts.traits.is_empty or check_inputs(self, input):  # nothing to quantize: the original layer
            if frozen is not None:
                return F.linear(input, self.weight_matrix().to(input.dtype), self.bias)
            return super().forward(input)
        if frozen is not None and frozen.cast == casts.fprop_w:
            return self.quantized_forward(input, self.weight, self.bias, frozen=frozen)
        weight = self.weight_matrix() if frozen is None else self.weight_matrix().to(input.dtype)
        if isinstance(weight, DTensor):
            return tensor_parallel(self.quantized_forward, input, weight, self.bias)
        return self.quantized_forward(input, weight, self.bias)

    def quantized_forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shards: Shards = WHOLE,
        window: Window | None = None,
        keys: Tensor | None = None,
        frozen: Frozen | None = None,
        number: int | None = None,
    ) -> Tensor:
        """Computes ``x · Wᵀ + b`` with quantized operands. With six casts of None it equals ``nn.Linear`` bit for bit,
        on CPUs without instructions for the dtype up to the order of sums.

        Args:
            x: ``[..., in_features]``; with a ``window`` images ``[N, C, *sizes]``.
            weight: ``[out_features, in_features]``, or the bytes of a ``frozen`` one.
            bias: ``[out_features]`` or None.
            shards, frozen: see :class:`lightning_lowbit.nn.core.function.How`.
            window: of a convolution, whose result has a row per position.
            keys: of this call; None for those of a new one.
            number: of one of several products of the call; None for the only one.
        """
        if x.is_nested:
            return nested_product(
                self.name_in_model, x, lambda rows: self.quantized_forward(rows, weight, bias, shards, frozen=frozen)
            )
        casts, source, shape, device = self.lowbit.casts, x, x.shape, x.device
        is_autocast, is_images = torch.is_autocast_enabled(device.type), window is not None
        dtype = self._dtype_of_pass(x, weight, is_autocast, frozen)
        rescale = None
        with no_autocast(device.type) if is_autocast else _NOTHING:
            if window is None:
                if len(shape) != 2:
                    x = x.flatten(0, -2) if len(shape) > 1 else x[None]  # flatten also takes empty tensors
            elif window.is_tiling:
                x, window = window.tiles(x.to(dtype)), None
            features = (weight if frozen is None else frozen).shape[-1]
            if window is None and (not shape or x.shape[1] != features):  # a rotation would pad both to whole groups
                raise ValueError(f"Layer {self.name_in_model} takes {features} features; got {tuple(shape)}.")
            if casts.smooth is not None:
                bias = None if bias is None else bias.to(dtype)
                x, weight, rescale = self._smoothed(x.to(dtype), weight.to(dtype), shards)
            pass_ = self._pass(dtype, keys_of_call(self) if keys is None else keys, number)
            how = self._how(dtype, device, shards, window, frozen, self._saves_codes(source, dtype, window, pass_))
            y: Tensor = QuantizedGemms.apply(x, weight, None if rescale is not None else bias, how, pass_)[0]  # type: ignore[no-untyped-call]
            if rescale is not None:
                y = y * rescale if bias is None else y * rescale + bias
        self._expect_plugin(y, weight)
        if is_images or len(shape) == 2:
            return y
        # As nn.Linear does: FSDP2 warns of modules that return a view.
        return unsafe_view(y, (*shape[:-1], y.shape[-1]))

    def _expect_plugin(self, y: Tensor, weight: Tensor) -> None:
        """Lets the backward pass refuse or warn, if nothing renews keys and amaxes anymore."""
        state = self.lowbit
        is_gone = state.plugin_is_gone or (state.amaxes is not None and state.amaxes.switch is None)
        if is_gone and self.training and weight.requires_grad and y.requires_grad:
            y.register_hook(partial(_report_missing_plugin, state.casts, state.amaxes))  # type: ignore[no-untyped-call]

    def _dtype_of_pass(self, x: Tensor, weight: Tensor, is_autocast: bool, frozen: Frozen | None) -> torch.dtype:
        """Returns the dtype in which a pass computes; a ``ValueError`` if it cannot compute these tensors in one."""
        dtype, gathered = x.dtype, self.lowbit.prequantized_weight
        is_quantized = gathered is not None or frozen is not None
        if dtype not in COMPUTED or not (is_quantized or weight.dtype in COMPUTED):
            refuse_dtypes(self.name_in_model, x, weight)
        if is_autocast and dtype != torch.float64:  # autocast does not cast float64
            dtype = torch.get_autocast_dtype(x.device.type)
        elif dtype != weight.dtype and frozen is None:
            raise ValueError(
                f"Input and weight of layer {self.name_in_model} must have one dtype; got {dtype} and {weight.dtype}. "
                "Cast one of them, or use torch.autocast."
            )
        if gathered is not None and gathered.source_dtype != dtype:
            raise ValueError(
                f"The weight of layer {self.name_in_model} was quantized in {gathered.source_dtype}, before it was "
                f"gathered, and this pass is one in {dtype}. Compute all its passes in one dtype, or leave out "
                "quantize_before_gather."
            )
        if self.lowbit.amaxes is None and self.lowbit.casts.traits.delayed:
            raise ValueError(
                f"Layer {self.name_in_model}: delayed scaling needs histories, set by the precision plugin, or by "
                "lightning_lowbit.nn.AmaxHistories where there is no Trainer."
            )
        return dtype

    def _pass(self, dtype: torch.dtype, keys: Tensor | None, number: int | None) -> Pass:
        """Returns the pass that begins now."""
        state, amaxes = self.lowbit, None
        gathered, watch = state.prequantized_weight, watched(state.operand_sums, state.gradient_sums)
        weight_amax = None if state.weight_amax is None else self.shared_amax(dtype)
        if gathered is not None:
            weight_amax = gathered.amax
        if state.amaxes is not None:
            in_force, staged, _, _, switch = state.amaxes
            amaxes = Amaxes(in_force, staged if switch is not None and switch[0] else None, weight_amax)
        elif weight_amax is not None:
            amaxes = Amaxes(None, None, weight_amax)
        return Pass(keys, number, amaxes, state.blend, watch, gathered)

    def _saves_codes(self, source: Tensor, dtype: torch.dtype, window: Window | None, pass_: Pass) -> bool:
        """Returns whether this pass saves codes of its input."""
        readers, calls = self.lowbit.readers, self.lowbit.calls
        if readers is None or window is not None or (calls is not None and calls.drawn is not None):
            return False  # in the last case a second backward pass draws the random bits of x anew
        saves, lacks_keys = readers.pack(self, source, dtype), pass_.keys is None and self.casts.traits.draws
        return saves and pass_.blend is None and pass_.gradient_sums is None and not lacks_keys

    def _how(
        self,
        dtype: torch.dtype,
        device: torch.device,
        shards: Shards = WHOLE,
        window: Window | None = None,
        frozen: Frozen | None = None,
        saves_codes: bool = False,
    ) -> How:
        """Returns how passes are computed now. It is worked out again only if one of its arguments has changed."""
        state, is_compiled, name = self.lowbit, torch.compiler.is_compiling(), self.name_in_errors
        casts, is_gathered, has_readers = state.casts, state.prequantized_weight is not None, state.readers is not None
        arguments = casts, dtype, device, state.exact, shards, name, window, frozen, is_gathered, saves_codes
        others = has_readers, state.backend, state.blend is None, state.grouped
        if not is_compiled and (last := _HOWS.get(self)) is not None and last[1] == arguments and last[2] == others:
            return last[0]
        native = self.native_kinds(device, dtype=dtype) if casts.traits.native_kinds else {}
        recasts = has_readers and self.keeps_parameter and casts.smooth is None and not is_gathered and frozen is None
        how = How(*arguments, native, recasts, self.is_grouped(device, dtype))
        if is_compiled:
            _note_graph()
        else:
            _HOWS[self] = how, arguments, others
        return how

    def _smoothed(self, x: Tensor, weight: Tensor, shards: Shards) -> tuple[Tensor, Tensor, Tensor | None]:
        """Multiplies x and w by the smoothing factor s, and returns with them a factor of the product, or None."""
        if self.lowbit.casts.smooth == "channel":  # Y = (X · diag(s)) · (W · diag(1/s))ᵀ + b
            s = smoothing_factor(self._channel_amax(x, shards), x.dtype)
            return x * s, weight * inverse(s), None
        s = smoothing_factor(self._token_amax(x, shards), x.dtype)  # Y = diag(1/s) · (diag(s) · X) · Wᵀ + b
        return x * s, weight, inverse(s)

    def _channel_amax(self, x: Tensor, shards: Shards) -> Tensor:
        """Returns float32 ``[in_features]``: of this batch in training, of the last training step in evaluation."""
        amax, amaxes = amax_along(x.detach(), 0)[0], self.lowbit.amaxes
        if amaxes is None:
            return amax
        channels, staged = amaxes.channels, amaxes.staged_channels
        if shards.x is not None:  # x is sharded along its features: take this process's channels
            channels, staged = (row.narrow(0, shards.x.start, len(amax)) for row in (channels, staged))
        if amaxes.switch is not None and amaxes.switch[0]:
            stage_(staged, amax)
            return amax
        return torch.where(channels > 0, channels, amax)

    def _token_amax(self, x: Tensor, shards: Shards) -> Tensor:
        """Takes float32 ``[tokens, 1]`` of the up projection's output, which its hook left in ``token_amax``."""
        amax, self.lowbit.token_amax = self.lowbit.token_amax, None
        if amax is None or amax.numel() != len(x):
            raise ValueError(
                f"Layer {self.name_in_model}: smooth='token' scales by the output of an MLP's up projection, and none "
                "has come before this pass: set it up with lightning_lowbit.smooth_swiglu(model, 'token'), or "
                "smooth channels."
            )
        return max_over_shards(amax.view(-1, 1), shards.x)

    def shared_amax(self, dtype: torch.dtype) -> Tensor | None:
        """Returns ``weight_amax``, rounded as the weight is, which is monotonic; None if it is not set."""
        amax = self.lowbit.weight_amax
        return None if amax is None else amax.to(dtype).float()

    def scaled_by(self, weight: Tensor) -> Tensor | None:
        """Returns the amax by which the forward pass scales its weight outside of a step; None for the weight's own."""
        state, amax = self.lowbit, self.shared_amax(weight.dtype)
        cast, amaxes = state.casts.cast_of("fprop_w"), state.amaxes
        if amaxes is None or cast is None or cast.scale.source == "current":
            return amax
        return amax_in_force(amaxes.in_force, "fprop_w", amax_of(weight) if amax is None else amax)

    def extra_repr(self) -> str:
        inherited = super().extra_repr()
        return f"{inherited}, casts={self.casts}" if inherited else f"casts={self.casts}"


class QuantLinear(QuantizedLayer, nn.Linear):
    """A converted ``nn.Linear``. With six casts of None it computes what ``nn.Linear`` does, to the bit."""


def check_smoothing(name: str, kind: str, casts: LinearCasts) -> None:
    """Raises a ``ValueError`` for smoothing in a layer of another kind than ``"linear"``."""
    if casts.smooth is not None and kind != "linear":
        raise ValueError(
            f"smooth={casts.smooth!r} scales the input of a linear layer, and {name or 'the model'} is of the kind "
            f"{kind!r}. Give such layers casts without it by overrides, or leave them out by skip."
        )


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Returns the converted layers of a model by name, each once, in the order of the modules."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def without_pass(layers: Mapping[str, QuantizedLayer]) -> list[str]:
    """Returns the names of layers with casts and a gradient, but no pass: something else reads their weights. It
    returns none after compilation, since passes in graphs leave no trace."""
    idle = {name: layer for name, layer in layers.items() if layer not in _HOWS and not layer.casts.traits.is_empty}
    return [n for n, layer in idle.items() if not _COMPILED and any(p.grad is not None for p in layer.own_parameters())]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_graph() -> None:
    _COMPILED.append(True)


def _report_missing_plugin(casts: LinearCasts, amaxes: LayerAmaxes | None, gradient: Tensor) -> None:
    """Refuses delayed scaling, whose amaxes would stay those of the last step; warns of all else. A backward hook."""
    message = (
        "This training goes on in low precision without the precision plugin that converted the model, or in a copy of "
        "the model that the plugin does not know: random bits stay those of its last step, and checkpoints do not tell "
        "the casts. Give the Trainer a plugin, and other loops LayerKeys and AmaxHistories, or end quantization: "
        "lightning_lowbit.convert(model, 'bf16')."
    )
    if casts.traits.delayed and amaxes is not None and amaxes.in_force.any():
        raise ValueError(f"{message} With delayed scaling, amaxes would stay those of the last step, too.")
    warnings.warn(message, stacklevel=2)
