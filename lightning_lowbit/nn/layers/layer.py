"""Linear layers whose GEMMs are quantized.

:func:`lightning_lowbit.convert` turns an ``nn.Linear`` into a ``QuantLinear`` in place by assigning its ``__class__``:
parameters, their names and all references to the module stay valid.
"""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.core.calls import Calls, keys_of_call
from lightning_lowbit.nn.core.frozen import Frozen
from lightning_lowbit.nn.core.function import QuantizedGemms
from lightning_lowbit.nn.core.gemm import no_autocast
from lightning_lowbit.nn.core.how import How
from lightning_lowbit.nn.core.inputs import COMPUTED, check_inputs, nested_product, refuse_dtypes, refuse_scripts
from lightning_lowbit.nn.core.operands import Amaxes, Pass, PrequantizedWeight
from lightning_lowbit.nn.core.parallel import WHOLE, Shards, tensor_parallel
from lightning_lowbit.nn.core.saving import Readers, saved_bits
from lightning_lowbit.nn.core.watch import LayerAmaxes, amax_in_force, stage_, watched
from lightning_lowbit.nn.core.window import Window
from lightning_lowbit.nn.layers.native import NativeGemms
from lightning_lowbit.quant import amax_along, smoothing_factor
from lightning_lowbit.quant.shard import amax_of, max_over_shards

# Removed from module names, so that a layer keeps its key when it is wrapped or compiled.
_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_products")
_NOTHING = nullcontext()

# How each layer computed its last pass, and the arguments of that. A copy of a layer, or a pickled one, has none.
_HOWS: WeakKeyDictionary[Any, tuple[How, Any, Any]] = WeakKeyDictionary()


class QuantizedLayer(NativeGemms):
    """Base class of converted layers.

    Attributes:
        casts: the casts in force.
        full_casts: the casts outside any phase.
        keys: int64 ``[6]``, the keys of stochastic rounding, in the order of ``OPERANDS``; None until set.
        calls: numbers the calls within a micro-batch, which have their own keys; None: all calls have ``keys``.
        is_left: whether nothing renews the keys anymore: it would be a mistake to train.
        amaxes: kept between steps; None until set.
        exact: computes float32 GEMMs over exact operands.
        backend: ``"auto"`` (native GEMMs where device and casts allow), ``"native"`` or ``"emulated"``.
        save: ``"inputs"`` or ``"codes"``: kept for the backward pass, see :mod:`lightning_lowbit.nn.core.saving`.
        readers: knows the layers that read one tensor together; None for ``save="inputs"``.
        keeps_input: with ``save="codes"``, whether too many layers read the input for each to keep its codes.
        blend: float32, 0-d: λ of annealing, see :func:`set_blend`; None for fully quantized operands.
        operand_sums, gradient_sums: rows of a :class:`~lightning_lowbit.nn.core.watch.Watch`; None if unmeasured.
        token_amax: float32 ``[tokens, 1]``, for smoothing the tokens of the next pass; None until set.
        weight_amax: float32, 0-d, scales the weight (:mod:`lightning_lowbit.nn.conversion.shared_amax`), if not None.
        frozen: what the bytes are that the weight is kept as (:func:`lightning_lowbit.pack_frozen`); None for a matrix.
        prequantized_weight: set while gathering a weight that is quantized (:mod:`lightning_lowbit.nn.sharded.gather`).
        name_in_model: what errors call the layer: its name in the model that was converted, or its class and shape.
    """

    kind: ClassVar[str] = "linear"
    keeps_parameter: ClassVar[bool] = True  # with save="codes": the weight is the parameter, or a view of it

    casts: LinearCasts = LinearCasts()
    full_casts: LinearCasts = LinearCasts()
    keys: Tensor | None = None
    calls: Calls | None = None
    is_left: bool = False
    amaxes: LayerAmaxes | None = None
    exact: bool = False
    backend: str = "auto"
    save: str = "inputs"
    readers: Readers | None = None
    keeps_input: bool = False
    blend: Tensor | None = None
    token_amax: Tensor | None = None
    operand_sums: Tensor | None = None
    gradient_sums: Tensor | None = None
    weight_amax: Tensor | None = None
    frozen: Frozen | None = None
    prequantized_weight: PrequantizedWeight | None = None
    name_in_model: str = "(without a name)"

    weight: Any  # as nn.Linear and Conv1D declare it
    bias: Any

    def __setstate__(self, state: Any) -> None:
        """Of a copy, or a layer that was pickled: what renews keys and amaxes, and measures, has stayed behind."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in ("weight_amax", "token_amax", "operand_sums", "gradient_sums", "prequantized_weight"):
            vars(self).pop(name, None)
        self.is_left = self.is_left or self.full_casts.plan.draws
        if self.amaxes is not None:
            self.amaxes = self.amaxes._replace(switch=None)

    def check_casts(self, casts: LinearCasts) -> None:
        """Raises a ``ValueError`` for casts that the layer cannot have."""
        if self.frozen is not None and casts.fprop_w not in (None, self.frozen.cast):
            raise ValueError(
                f"The weight is kept as codes of {self.frozen.cast}, and the casts quantize it to {casts.fprop_w}. "
                "Give the layer casts with the same fprop_w, or call lightning_lowbit.unpack_frozen(model) first."
            )

    def set_casts(self, casts: LinearCasts) -> None:
        """Sets the casts outside any phase. A change drops amaxes, which may be those of other operands."""
        self.check_casts(casts)
        if casts != self.full_casts:
            self.amaxes = None
        self.full_casts = self.casts = casts

    def weight_matrix(self) -> Tensor:
        """The weight as ``[out_features, in_features]``, or a stack of such matrices."""
        frozen = getattr(self, "frozen", None)  # also called for layers that are not converted
        return self.weight if frozen is None else frozen.dense(self.weight.detach())

    def set_weight_matrix(self, values: Tensor) -> None:
        """Writes values of :meth:`weight_matrix` to the parameter."""
        self.weight_matrix().detach().copy_(values)

    @staticmethod
    def obstacle(module: Any) -> str | None:
        """Why a module of a class that can be converted stays in high precision; None if it can be converted."""
        return None

    @property
    def size_text(self) -> str:
        """``in → out`` features, or ``8 × (in → out)`` of a stack, as tables show them."""
        *stack, out_features, in_features = self.weight_matrix().shape
        size = f"{in_features} → {out_features}"
        return f"{stack[0]} × ({size})" if stack else size

    def kept_input(self, dtype: torch.dtype) -> tuple[int, float]:
        """Elements of an input token, and the bits of each that are kept for a backward pass in ``dtype``."""
        return self.weight_matrix().shape[-1], saved_bits(self.full_casts, self.save, dtype)

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters that are the layer's, wherever they are registered."""
        return list(self.parameters(recurse=False))

    @property
    def device(self) -> torch.device:
        """The device on which the layer computes."""
        return self.weight.device

    @property
    def called(self) -> str:
        """:attr:`name_in_model`, but in compiled graphs, which the blocks of a model share."""
        return "(compiled)" if torch.compiler.is_compiling() else self.name_in_model

    def __prepare_scriptable__(self) -> Any:  # torch.jit.script asks for it
        refuse_scripts(self.name_in_model)

    def forward(self, input: Tensor) -> Tensor:  # as nn.Linear names it, which callers may do too
        """``x · Wᵀ + b`` for ``x`` ``[..., in_features]``; under autocast in its dtype."""
        if self.casts.plan.is_empty or check_inputs(self, input):  # nothing to quantize: the original layer
            if self.frozen is not None:
                return F.linear(input, self.weight_matrix().to(input.dtype), self.bias)
            return super().forward(input)
        if self.frozen is not None and self.frozen.cast == self.casts.fprop_w:
            return self.quantized_forward(input, self.weight, self.bias, frozen=self.frozen)
        weight = self.weight_matrix() if self.frozen is None else self.weight_matrix().to(input.dtype)
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
        part: int | None = None,
    ) -> Tensor:
        """Computes ``x · Wᵀ + b`` with quantized operands.

        With six casts of None it equals ``nn.Linear`` bit for bit, on CPUs without instructions for the dtype up to the
        order of sums.

        Args:
            x: ``[..., in_features]``; with a ``window`` images ``[N, C, *sizes]``.
            weight: ``[out_features, in_features]``, or the bytes of a ``frozen`` one.
            bias: ``[out_features]`` or None.
            shards: which of x, w and g are shards of global matrices.
            window: of a convolution, whose result has a row per position.
            keys: of this call; None for those of a new one.
            frozen: what the bytes are; None for a matrix.
            part: which of several products of the call this is; None for the only one.
        """
        if x.is_nested:
            return nested_product(
                self.name_in_model, x, lambda rows: self.quantized_forward(rows, weight, bias, shards, frozen=frozen)
            )
        casts, source, shape, device = self.casts, x, x.shape, x.device
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
                raise ValueError(f"The layer takes {features} features; got {tuple(shape)}.")
            if casts.smooth is not None:
                bias = None if bias is None else bias.to(dtype)
                x, weight, rescale = self._smoothed(x.to(dtype), weight.to(dtype), shards)
            one = self._pass(dtype, keys_of_call(self) if keys is None else keys, part)
            how = self._how(dtype, device, shards, window, frozen, self._saves_codes(source, dtype, window, one))
            y: Tensor = QuantizedGemms.apply(x, weight, None if rescale is not None else bias, how, one)[0]  # type: ignore[no-untyped-call]
            if rescale is not None:
                y = y * rescale if bias is None else y * rescale + bias
        self._expect_plugin(y, weight)
        if is_images or len(shape) == 2:
            return y
        # As nn.Linear does: FSDP2 warns of modules that return a view.
        return torch.ops.aten._unsafe_view.default(y, (*shape[:-1], y.shape[-1]))

    def _expect_plugin(self, y: Tensor, weight: Tensor) -> None:
        """Has the backward pass of an output refused, or warned of, if nothing renews keys and amaxes anymore."""
        is_left = self.is_left or (self.amaxes is not None and self.amaxes.switch is None)
        if is_left and self.training and weight.requires_grad and y.requires_grad:
            y.register_hook(partial(_report_missing_plugin, self.casts, self.amaxes))  # type: ignore[no-untyped-call]

    def _dtype_of_pass(self, x: Tensor, weight: Tensor, is_autocast: bool, frozen: Frozen | None) -> torch.dtype:
        """The dtype in which a pass computes; a ``ValueError`` if it cannot compute these tensors in one."""
        dtype, gathered = x.dtype, self.prequantized_weight
        is_quantized = gathered is not None or frozen is not None
        if dtype not in COMPUTED or not (is_quantized or weight.dtype in COMPUTED):
            refuse_dtypes(self.name_in_model, x, weight)
        if is_autocast and dtype != torch.float64:  # autocast does not cast float64
            dtype = torch.get_autocast_dtype(x.device.type)
        elif dtype != weight.dtype and frozen is None:
            raise ValueError(
                f"Input and weight must have one dtype; got {dtype} and {weight.dtype}. Cast one of them, or use "
                "torch.autocast."
            )
        if gathered is not None and gathered.source_dtype != dtype:
            raise ValueError(
                f"The weight was quantized in {gathered.source_dtype}, before it was gathered, and this pass is "
                f"one in {dtype}. Compute all passes of the layer in one dtype, or leave out quantize_before_gather."
            )
        if self.amaxes is None and self.casts.plan.delayed:
            raise ValueError(
                "Delayed scaling needs histories: they are set by the precision plugin, or by "
                "lightning_lowbit.nn.AmaxHistories where there is no Trainer."
            )
        return dtype

    def _pass(self, dtype: torch.dtype, keys: Tensor | None, part: int | None) -> Pass:
        """Returns the pass that begins now."""
        amaxes, gathered, watch = None, self.prequantized_weight, watched(self.operand_sums, self.gradient_sums)
        weight_amax = None if self.weight_amax is None else self.shared_amax(dtype)
        if gathered is not None:
            weight_amax = gathered.amax
        if self.amaxes is not None:
            in_force, staged, _, _, switch = self.amaxes
            amaxes = Amaxes(in_force, staged if switch is not None and switch[0] else None, weight_amax)
        elif weight_amax is not None:
            amaxes = Amaxes(None, None, weight_amax)
        return Pass(keys, part, amaxes, self.blend, watch, gathered)

    def _saves_codes(self, source: Tensor, dtype: torch.dtype, window: Window | None, one: Pass) -> bool:
        """Returns whether this pass saves codes of its input: not if a second backward pass will draw the random bits
        of x anew, and not if there will be none."""
        if self.readers is None or window is not None or (self.calls is not None and self.calls.drawn is not None):
            return False
        saves = self.readers.pack(self, source, dtype)
        if one.blend is not None or one.gradient_sums is not None or (one.keys is None and self.casts.plan.draws):
            return False
        return saves

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
        casts, is_gathered, has_readers = self.casts, self.prequantized_weight is not None, self.readers is not None
        is_compiled = torch.compiler.is_compiling()
        arguments = casts, dtype, device, self.exact, shards, self.called, window, frozen, is_gathered, saves_codes
        state = has_readers, self.backend, self.blend is None
        if not is_compiled and (last := _HOWS.get(self)) is not None and last[1] == arguments and last[2] == state:
            return last[0]
        native = self.native_gemms(device, dtype=dtype) if casts.plan.native_gemms else ()
        recasts = has_readers and self.keeps_parameter and casts.smooth is None and not is_gathered and frozen is None
        how = How(*arguments, native, recasts)
        if not is_compiled:
            _HOWS[self] = how, arguments, state
        return how

    def _smoothed(self, x: Tensor, weight: Tensor, shards: Shards) -> tuple[Tensor, Tensor, Tensor | None]:
        """x and w with the smoothing factor s in them, and the factor of the product (None for 1).

        Y = (X · diag(s)) · (W · diag(1/s))ᵀ + b      per channel
        Y = diag(1/s) · (diag(s) · X) · Wᵀ + b        per token
        """
        if self.casts.smooth == "channel":
            s = smoothing_factor(self._channel_amax(x, shards), x.dtype)
            return x * s, weight * s.reciprocal(), None
        s = smoothing_factor(self._token_amax(x, shards), x.dtype)
        return x * s, weight, s.reciprocal()

    def _channel_amax(self, x: Tensor, shards: Shards) -> Tensor:
        """float32 ``[in_features]``: of this batch in training, of the last training step in evaluation."""
        amax = amax_along(x.detach(), 0)[0]
        if self.amaxes is None:
            return amax
        channels, staged = self.amaxes.channels, self.amaxes.staged_channels
        if shards.x is not None:  # x is sharded along its features: take this process's channels
            channels, staged = (row.narrow(0, shards.x.start, len(amax)) for row in (channels, staged))
        if self.amaxes.switch is not None and self.amaxes.switch[0]:
            stage_(staged, amax)
            return amax
        return torch.where(channels > 0, channels, amax)

    def _token_amax(self, x: Tensor, shards: Shards) -> Tensor:
        """float32 ``[tokens, 1]``: of the up projection's output, which its hook left in ``token_amax``."""
        amax, self.token_amax = self.token_amax, None
        if amax is None or amax.numel() != len(x):
            raise ValueError(
                "smooth='token' scales by the output of an MLP's up projection, and none has come before this pass: "
                "set it up with lightning_lowbit.smooth_swiglu(model, 'token'), or smooth channels."
            )
        return max_over_shards(amax.view(-1, 1), shards.x)

    def shared_amax(self, dtype: torch.dtype) -> Tensor | None:
        """``weight_amax`` rounded to the weight's dtype, which is monotonic; None if it is not set."""
        return None if self.weight_amax is None else self.weight_amax.to(dtype).float()

    def scaled_by(self, weight: Tensor) -> Tensor | None:
        """The amax by which the forward pass scales its weight outside of a step; None for the weight's own."""
        amax, cast = self.shared_amax(weight.dtype), self.casts.cast_of("fprop_w")
        if self.amaxes is None or cast is None or cast.scale.source == "current":
            return amax
        return amax_in_force(self.amaxes.in_force, "fprop_w", amax_of(weight) if amax is None else amax)

    def extra_repr(self) -> str:
        """Shows the casts in force in ``print(model)``."""
        inherited = super().extra_repr()
        return f"{inherited}, casts={self.casts}" if inherited else f"casts={self.casts}"


class QuantLinear(QuantizedLayer, nn.Linear):
    """A converted ``nn.Linear``. With six casts of None it computes what ``nn.Linear`` does, to the bit."""


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The converted layers of a model by name, each once, in the order of the modules."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def clean_name(name: str) -> str:
    """A module's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _report_missing_plugin(casts: LinearCasts, amaxes: LayerAmaxes | None, gradient: Tensor) -> None:
    """Refuses delayed scaling, whose amaxes would stay those of the last step; warns of all else. A backward hook."""
    message = (
        "This training goes on in low precision without the precision plugin that converted the model, or in a copy of "
        "the model that the plugin does not know: random bits stay those of its last step, and checkpoints do not tell "
        "the casts. Give the Trainer a plugin, and other loops LayerKeys and AmaxHistories, or end quantization: "
        "lightning_lowbit.convert(model, 'bf16')."
    )
    if casts.plan.delayed and amaxes is not None and amaxes.in_force.any():
        raise ValueError(f"{message} With delayed scaling, amaxes would stay those of the last step, too.")
    warnings.warn(message, stacklevel=2)
