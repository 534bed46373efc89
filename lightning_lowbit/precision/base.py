"""One precision plugin for every Trainer: it converts the model, and keeps all state that quantization needs.

    Trainer.fit ── convert_module          the model's linear layers become QuantLinear, in place
                ── train_step_context      autocast; keys of this micro-batch's random bits; amaxes are staged
                ── optimizer_step          counts the step; amaxes enter their histories

Layers, their casts and what outlives a step of them belong to its :class:`ConvertedModel`, the scale of the loss to its
:class:`LossScaling`. The state (step, micro-batch, phase, changed casts, λ, amaxes) is saved under one key whatever the
plugin's class, as tensors and primitives, the same on all ranks. The model's ``state_dict`` is untouched: its weights
load into the unconverted model.
"""

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_lowbit._lightning import (
    FSDPPrecision,
    LightningModule,
    LightningOptimizer,
    MisconfigurationException,
    TrainerFn,
    both_are_imported,
    goes_with,
    rank_zero_info,
    rank_zero_warn,
    say_once,
)
from lightning_lowbit.distributed import clip_gradient_norm_, connect, largest_magnitudes
from lightning_lowbit.nn.amax import AmaxHistories
from lightning_lowbit.nn.casts import SMOOTHINGS, LinearCasts
from lightning_lowbit.nn.context import ForwardContext
from lightning_lowbit.nn.conversion.convert import CastsLike, check_backend, convert_layers, plan, plan_by_name
from lightning_lowbit.nn.conversion.shared_amax import SharedAmaxes, check_groups, groups
from lightning_lowbit.precision.checkpoints.files import CHECKPOINT_KEY, Checkpoint, load_checkpoint, state_of
from lightning_lowbit.precision.checkpoints.overridden import asked_options, overridden, warn_of
from lightning_lowbit.precision.checkpoints.trained import LACKING, Origin, Trained, check_changes
from lightning_lowbit.precision.converted_model import ConvertedModel
from lightning_lowbit.precision.coverage_line import CoverageLine
from lightning_lowbit.precision.loss_scaling import LossScaling, scaler_for
from lightning_lowbit.precision.run_settings import compute_dtype, global_seed, run_of
from lightning_lowbit.precision.shown import Shown
from lightning_lowbit.quant.cast import choose

if TYPE_CHECKING:
    from lightning_lowbit.nn.sharded.gather import WeightGathers

__all__ = ["LowBitPrecision", "compute_dtype"]

_COMPUTE_DTYPES: dict[str, tuple[Literal["bf16-mixed", "16-mixed", "32-true"], torch.dtype]] = {
    "bf16": ("bf16-mixed", torch.bfloat16),
    "fp16": ("16-mixed", torch.float16),
    "fp32": ("32-true", torch.float32),
}


def _as_list(patterns: Iterable[str]) -> Iterable[str]:
    return patterns if isinstance(patterns, str) else list(patterns)  # a string is refused when it is used


def _data_rank(trainer: Any) -> int:
    """Of this process among those that see other data: processes that share tensors see the same."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("rank", trainer.global_rank))


class LowBitPrecision(Shown, FSDPPrecision):
    """Trains the linear layers of any ``LightningModule`` with the given casts.

    Args:
        casts: a preset's name, :class:`LinearCasts`, or a mapping of its fields (and ``preset`` to start from).
        skip: patterns of layers to leave in high precision, e.g. ``["lm_head"]``; see :func:`convert`.
        only: patterns of the layers to convert; None for all.
        overrides: other casts for some layers, by pattern.
        compute_dtype: ``"bf16"``, ``"fp16"`` (autocast) or ``"fp32"``: what everything else computes in, and what
            operands are rounded to before they are quantized. Parameters stay as they are.
        scaler: of the loss, for ``"fp16"``: any ``torch.amp.GradScaler``, see
            :mod:`lightning_lowbit.precision.grad_scalers`; None for a :class:`lightning_lowbit.ConservativeGradScaler`.
            It serves every strategy, sharded ones too. In manual optimization, gradients are scaled from
            ``manual_backward`` until ``clip_gradients`` or ``step``, and those that one optimizer accumulates over
            steps of another need a scale that stays: a ``StaticGradScaler``.
        seed: of the random bits of stochastic rounding; None takes that of ``seed_everything``, or 0.
        exact: emulate GEMMs in float32 over exact operands, rounded once. Slow; for comparisons.
        backend: ``"auto"``: GEMMs of FP8 or integers with scales per tensor or row run natively on hardware that has
            them, all others are emulated; ``"native"`` refuses hardware and casts without native GEMMs; ``"emulated"``
            never uses them.
        smooth_swiglu: ``"channel"`` or ``"token"``: what enters the down projections of SwiGLU MLPs is brought to one
            size, a help for FP8 with one scale per tensor; see :mod:`lightning_lowbit.nn.conversion.smooth_swiglu`.
        fresh_histories: delayed scaling and smoothing start anew, whatever a checkpoint holds of them.
        shared_amax: patterns of layers; the weights of those that one of them matches within one module are scaled by
            their largest magnitude together, as engines need that fuse them: ``["(q|k|v)_proj", "gate_proj|up_proj"]``;
            see :mod:`lightning_lowbit.nn.conversion.shared_amax`.
        quantize_before_gather: FSDP2 (``ModelParallelStrategy``) gathers weights as codes and scales wherever results
            are, to the bit, those of gathering them in high precision; see :mod:`lightning_lowbit.nn.sharded.gather`.
        casts_of_checkpoint: ``validate``, ``test`` and ``predict`` refuse a checkpoint that was trained with other
            casts; False evaluates it with these casts all the same. Training on with other casts is always possible,
            and is said.

    Attributes:
        step: optimizer steps taken.
        micro_batch: training steps taken since the last optimizer step.
        overridden: what the checkpoint holds in the place of options that this run asks for, a line for each.
        scaler: of the loss, or None.

    Raises:
        ValueError: an argument is not one of the above; or, when the model is converted, a pattern matches no layer,
            layers cannot share an amax, or no weight can be quantized before it is gathered; or, when a checkpoint is
            loaded, its state is damaged, or was trained with other casts than those that are to be evaluated.
        MisconfigurationException: the plugin is used outside ``lightning.pytorch.Trainer``, with DeepSpeed, or a scaler
            with ranks that are not there; or, in a step, a scaler with LBFGS.

    Example:
        >>> Trainer(plugins=[LowBitPrecision("nvfp4", skip=["lm_head"])])
    """

    def __init__(
        self,
        casts: CastsLike,
        *,
        skip: Iterable[str] = (),
        only: Iterable[str] | None = None,
        overrides: Mapping[str, CastsLike] | None = None,
        compute_dtype: str = "bf16",
        scaler: GradScaler | None = None,
        seed: int | None = None,
        exact: bool = False,
        backend: str = "auto",
        smooth_swiglu: str | None = None,
        fresh_histories: bool = False,
        shared_amax: Iterable[str] = (),
        quantize_before_gather: bool = False,
        casts_of_checkpoint: bool = True,
    ) -> None:
        precision, self._compute_dtype = _COMPUTE_DTYPES[choose("compute_dtype", compute_dtype, _COMPUTE_DTYPES)]
        super().__init__("bf16-mixed")  # with "16-mixed" it makes a scaler of its own, which asks for CUDA
        self.precision = precision
        self.scaler: GradScaler | None = scaler_for(compute_dtype, scaler)  # type: ignore[assignment]  # of any class
        self._scaling = None if self.scaler is None else LossScaling(self.scaler)
        self.casts = LinearCasts.of(casts)
        self.overrides = {pattern: LinearCasts.of(value) for pattern, value in (overrides or {}).items()}
        self.skip, self.only = _as_list(skip), None if only is None else _as_list(only)
        self.shared_amax = _as_list(shared_amax)
        self.seed, self.exact = global_seed() if seed is None else seed, exact
        self.backend, self.smooth_swiglu = backend, smooth_swiglu
        self.fresh_histories, self.quantize_before_gather = fresh_histories, quantize_before_gather
        self.casts_of_checkpoint = casts_of_checkpoint
        if smooth_swiglu is not None:
            choose("kind of smooth_swiglu", smooth_swiglu, SMOOTHINGS)
        check_backend({"": self.casts, **self.overrides}, backend, exact)
        self.step = 0
        self.micro_batch = 0
        self._is_sharded = False
        self._root: nn.Module | None = None
        self._trainer: weakref.ref[Any] | None = None
        self._device = torch.device("cpu")
        self._rank = 0
        self._converted = ConvertedModel()
        self.coverage_line = CoverageLine()
        self._shared: SharedAmaxes | None = None
        self._gathers: WeightGathers | None = None
        self._origin: Origin | None = None
        self._asked, self.overridden = asked_options([], []), list[str]()
        if both_are_imported():
            say_once(f"{goes_with(self)}.")

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, weights_only: bool = True, **changes: Any) -> "LowBitPrecision":
        """The plugin that trained a checkpoint: the same casts of the same layers, whatever its class was.

        In ``validate``, ``test`` and ``predict`` it also has the checkpoint's phase, λ and amaxes, with or without
        ``ckpt_path``. In ``fit`` it takes them from ``ckpt_path``, and begins a run of its own without one.

        Args:
            checkpoint: a path, also of a folder of shards, or what ``torch.load`` has made of one.
            weights_only: as in ``torch.load``.
            **changes: arguments of :class:`LowBitPrecision` that do not change what is computed: ``scaler``, ``seed``,
                ``exact``, ``backend``, ``fresh_histories``, ``quantize_before_gather``, ``casts_of_checkpoint``.

        Raises:
            ValueError: the checkpoint does not say how it was trained, is damaged, or ``changes`` has another argument.

        Example:
            >>> Trainer(plugins=[LowBitPrecision.from_checkpoint("last.ckpt")]).validate(model, ckpt_path="last.ckpt")
        """
        origin = Origin.read(load_checkpoint(checkpoint, weights_only))
        plugin = LowBitPrecision(**{**origin.arguments(), **check_changes(changes)})
        plugin._origin, plugin._arguments = origin, f"<of a checkpoint: {origin.trained}>"
        return plugin

    def __str__(self) -> str:
        # What the Trainer of the other Lightning quotes where it refuses the plugin.
        return f"{self!r} ({goes_with(self)})" if both_are_imported() else repr(self)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What everything that is not quantized computes in."""
        return self._compute_dtype

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        return None if self._compute_dtype == torch.float32 else self._compute_dtype

    @property
    def phase(self) -> str:
        """The phase in force, set by :meth:`set_phase`."""
        return self._converted.phase

    @property
    def phases_set(self) -> int:
        """How often :meth:`set_phase` was called, also with the phase in force; in this process, not in the run."""
        return self._converted.phases_set

    @property
    def blend(self) -> Tensor:
        """λ of progressive quantization, 0-d float32, set by :meth:`set_blend`."""
        return self._converted.blend

    @property
    def is_blending(self) -> bool:
        """Whether λ is below 1."""
        return self._converted.is_blending

    @property
    def histories(self) -> AmaxHistories | None:
        """The amaxes that outlive a step; None before the model is converted."""
        return self._converted.histories

    @property
    def skipped_steps(self) -> Tensor:
        """Optimizer steps that were left out in fp16, since a gradient was not finite; 0-d int64, on the device.

        ``step``, Lightning's ``global_step`` and with them learning-rate schedules count them nonetheless, so that a
        run has the length it was given; how many there were is said at its end.
        """
        return torch.tensor(0, device="cpu") if self._scaling is None else self._scaling.skipped_steps

    # --- conversion and phases ---

    def plan(self, model: nn.Module) -> dict[str, LinearCasts]:
        """The casts that each layer of a model would get, by name, without changing it. Raises as conversion does."""
        if self._origin is not None:
            planned = plan_by_name(model, self._origin.trained.planned)
        else:
            planned = plan(model, self.casts, self.skip, self.only, self.overrides, self.smooth_swiglu)
        if self.shared_amax:
            check_groups(planned, self.shared_amax)
        return planned

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the model in place."""
        trainer, module = run_of(self, module)
        strategy = trainer.strategy
        if self._trainer is not None and self._trainer() is not trainer:  # another run
            self.step, self.micro_batch = 0, 0
            self._converted.start_afresh()
            self.coverage_line.restart()
            self.set_blend(1.0)
        if self._scaling is not None and (self._trainer is None or self._trainer() is not trainer):
            self._scaling.restart()  # also the first time: another plugin may have used the same scaler
        self._trainer = weakref.ref(trainer)
        self._converted.expect(module)
        if self._scaling is not None:
            self._scaling.check(module, type(strategy).__name__)
        self._device, self._rank = strategy.root_device, _data_rank(trainer)
        planned = self.plan(module)
        check_backend(planned, self.backend, self.exact, self._device)  # raises before anything is changed
        if self.quantize_before_gather:
            from lightning_lowbit.nn.sharded.gather import WeightGathers, check_gathers  # knows FSDP2 from the inside

            check_gathers(module, planned, self._autocast_dtype)
        restored = getattr(getattr(ForwardContext.of(module), "enter", None), "trained", None)
        self._convert(module, planned)
        if self.quantize_before_gather:
            self._gathers = WeightGathers(module, self._autocast_dtype, planned)
        if self._origin is not None and self._is_evaluating:
            self._load(self._origin.state)
        if restored is not None:
            self._compare(restored, "The model, restored from a checkpoint,")
        return module

    def attach(self, model: nn.Module, planned: Mapping[str, LinearCasts]) -> None:
        """Converts a model that no Trainer runs, for a plugin :meth:`from_checkpoint`; see :func:`restore`."""
        assert self._origin is not None
        self._converted.expect(model)
        self._convert(model, planned)
        self._load(self._origin.state)

    def move_to(self, device: torch.device) -> None:
        """Says where a model computes that no Trainer runs."""
        self._device = device

    def _convert(self, model: nn.Module, planned: Mapping[str, LinearCasts]) -> None:
        """Converts layers, and takes what belongs to them."""
        convert_layers(model, planned, self.exact, self.backend)
        self._root = model
        self._converted.take(model, planned, self.seed)
        self.set_blend(float(self.blend))
        self._shared = SharedAmaxes(model, self.shared_amax) if self.shared_amax else None

    @property
    def _is_evaluating(self) -> bool:
        """Whether the Trainer validates, tests or predicts; validation within ``fit`` does not count."""
        trainer = None if self._trainer is None else self._trainer()
        return trainer is not None and trainer.state.fn is not None and trainer.state.fn != TrainerFn.FITTING

    def set_phase(self, phase: str) -> None:
        """Puts all layers into a phase: ``"fqt"``, ``"qaf"``, ``"hp-forward"`` or ``"bf16"``.

        Raises:
            ValueError: there is no such phase.
        """
        self._converted.set_phase(phase)

    def set_casts(self, casts: Mapping[str, CastsLike]) -> None:
        """Gives layers other casts; the phase stays in force on top of them.

        Casts that were changed are part of a checkpoint. A run with another Trainer begins with the constructor's.
        Delayed scaling and smoothing start anew for these layers, and go on for all others.

        Args:
            casts: by pattern of layers, of which the first one that matches a layer holds (see
                :func:`lightning_lowbit.convert`), what :meth:`LinearCasts.of` takes, or a phase's name: the casts of
                the constructor in this phase, so that ``"fqt"`` gives these back. Layers that no pattern matches keep
                what they have.

        Raises:
            ValueError: a pattern matches no converted layer, there is no such preset or phase, the backend has no
                native form of such casts, or layers could no longer share an amax; nothing has been changed then.
            MisconfigurationException: there is no model yet; give ``overrides`` to the constructor.

        Example:
            >>> trainer.precision_plugin.set_casts({"lm_head": "bf16", "down_proj": "nvfp4-4over6"})
        """
        self._converted.set_casts(self.resolve_casts(casts))

    def resolve_casts(self, casts: Mapping[str, CastsLike]) -> dict[str, LinearCasts]:
        """The casts that :meth:`set_casts` would give to each layer that a pattern matches, without changing anything.

        Arguments and errors are the same.
        """
        changes = self._converted.resolve_casts(casts, self.smooth_swiglu)
        check_backend(changes, self.backend, self.exact, self._device)
        if self.shared_amax:
            groups({**self.casts_of(".*"), **changes}, self.shared_amax)  # or else raises
        return changes

    def casts_of(self, pattern: str) -> dict[str, LinearCasts]:
        """The casts, outside any phase, of the converted layers that a pattern matches, by name.

        Raises:
            ValueError: it matches none.
        """
        return self._converted.casts_of(pattern)

    def set_blend(self, value: float) -> None:
        """Sets λ, how far operands are quantized: from 0 (high precision) to 1 (all the way).

        Operands that have a cast are ``x + λ (q(x) - x)``. From one λ below 1 to another nothing is compiled anew; at 1
        operands are again what hardware takes.

        Raises:
            ValueError: a number outside [0, 1].
        """
        self._converted.set_blend(value)

    # --- one step ---

    def convert_input(self, data: Any) -> Any:
        """Leaves batches as they are, as Lightning's ``bf16-mixed`` does (FSDP's would cast them)."""
        return data

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Autocast to the compute dtype."""
        self._converted.prepare(self.step, self.micro_batch, self._rank, self._device)
        if self._gathers is not None:
            self._gathers.prepare()
        self._share_amaxes()
        dtype = self._autocast_dtype
        with nullcontext() if dtype is None else torch.autocast(self._device.type, dtype=dtype):
            yield
        if self._gathers is not None and not torch.is_grad_enabled():
            self._gathers.reshard()

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """The forward context, with random bits of this micro-batch's own (the backward pass still uses them)."""
        with self.forward_context():
            self._converted.record(True)
            yield
        if not self._is_automatic:  # its backward passes and steps were in here
            self._converted.record(False)
            self._update_scale()
            self.coverage_line.say(self._trainer)
        self.micro_batch += 1

    def _share_amaxes(self) -> None:
        if self._shared is not None:
            self._shared.measure(partial(largest_magnitudes, device=self._device))

    def expect_draws(self, on: bool = True) -> None:
        """Says before a forward pass whether :meth:`another_draw` will follow it."""
        self._converted.expect_draws(on)

    @contextmanager
    def another_draw(self, number: int = 0) -> Generator[None, None, None]:
        """A context for another backward pass over the graph of the micro-batch, with other random bits.

        Before the backward pass of training, after :meth:`expect_draws` and a forward pass. Only what the backward pass
        rounds stochastically is drawn anew; what it records in layers and histories is forgotten.

        Args:
            number: of the draw, 0 or more; each has other bits.

        Raises:
            MisconfigurationException: the forward pass does not say which random bits it used.
        """
        with self._converted.another_draw(number):
            yield

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scales the loss of fp16; by hand, a backward pass after steps begins anew."""
        self._update_scale()
        self.coverage_line.see(tensor, module, self.phase == "fqt")
        return super().pre_backward(tensor, module)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Ends what belongs to a micro-batch: the backward pass may compute activations again, hooks may evaluate."""
        if self._is_automatic:
            self._converted.record(False)
            self.coverage_line.say(self._trainer)
        return super().post_backward(tensor, module)

    @property
    def _is_automatic(self) -> bool:
        """Whether Lightning runs backward passes and steps, after ``training_step``; if not, that runs them itself."""
        model = self._converted.model
        return not isinstance(model, LightningModule) or model.automatic_optimization

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Steps, and counts the step; what it staged enters the histories, by one collective for all layers."""
        if self._scaling is None:
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
        else:
            result = self._step_scaled(self._scaling, optimizer, model, closure, **kwargs)
        self.step += 1
        self.micro_batch = 0
        self._converted.advance_()
        if self._gathers is not None:
            self._gathers.forget()
        self._share_amaxes()
        if self._is_automatic:  # also where there was no backward pass
            self._converted.record(False)
        return result

    def _step_scaled(
        self, scaling: LossScaling, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        closure()
        self._unscale_(optimizer)
        self._after_closure(model, optimizer)
        result = scaling.step(optimizer, **kwargs)
        if self._is_automatic:
            self._update_scale()
        return result

    def _unscale_(self, optimizer: Any) -> None:
        if self._scaling is not None:
            self._scaling.unscale_(optimizer, self._device, self._is_sharded)

    def _update_scale(self) -> None:
        growth = None if self._scaling is None else self._scaling.update()
        if growth is not None and self.histories:
            self.histories.scale_gradients_(growth)

    # --- gradient clipping, on every strategy ---

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Keeps the wrapped model: under FSDP1 only its root can compute a gradient norm, or knows what is where."""
        self._root = model
        self._is_sharded = any(isinstance(part, FullyShardedDataParallel) for part in model.modules()) or any(
            isinstance(parameter, DTensor) for parameter in model.parameters()
        )
        connect(model)
        self._asked, self.overridden = asked_options(optimizers, lr_schedulers), []
        if self.shared_amax and any(getattr(parameter, "_is_flat_param", False) for parameter in model.parameters()):
            raise MisconfigurationException(
                "shared_amax needs to tell weights from each other between steps, and FSDP1 keeps flat buffers alone. "
                "Train with FSDPStrategy(use_orig_params=True), its default, or with ModelParallelStrategy (FSDP2)."
            )
        return super().connect(model, optimizers, lr_schedulers)

    def clip_gradients(self, optimizer: Any, clip_val: int | float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Clips the gradients, unscaled; by hand, before the step, they are not yet."""
        if clip_val > 0:
            self._unscale_(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clips the gradients to a total norm."""
        parameters = [*self.main_params(optimizer)]
        is_flat = any(getattr(parameter, "_is_flat_param", False) for parameter in parameters)
        if is_flat and isinstance(self._root, FullyShardedDataParallel):  # without the original parameters
            self._root.clip_grad_norm_(clip_val)
        elif self._is_sharded:
            clip_gradient_norm_(parameters, clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)

    # --- state ---

    @property
    def _accumulated(self) -> int:
        """Micro-batches of an optimizer step on one device, as Lightning counts them."""
        trainer = None if self._trainer is None else self._trainer()
        return 1 if trainer is None else int(trainer.accumulate_grad_batches)

    def state_dict(self) -> dict[str, Any]:
        """Empty: Lightning would file it under the name of the class, see :meth:`on_save_checkpoint`."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the state under a key that does not depend on the plugin's class."""
        state: dict[str, Any] = {name: getattr(self, name) for name in ("step", "micro_batch", "phase", "seed")}
        state["blend"] = self.blend.cpu().clone()
        if self.histories:  # of gradients, too, which Lightning divides by it
            state["accumulated"] = self._accumulated
        if self._scaling is not None:
            state |= self._scaling.state_dict()
        checkpoint[CHECKPOINT_KEY] = state | self._converted.state_dict() | {"trained": self.trained.record()}

    @property
    def trained(self) -> Trained:
        """What decides, beside the weights, what the model computes."""
        return Trained(
            self._converted.casts,
            next(name for name, (_, dtype) in _COMPUTE_DTYPES.items() if dtype == self._compute_dtype),
            self.smooth_swiglu,
            (*self.shared_amax,),
            self.exact,
            self.backend,
            None if self.scaler is None else type(self.scaler).__name__,
            self._converted.started,
        )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the state of a checkpoint; one that was saved without this plugin, or weights only, has none.

        Raises:
            ValueError: its state is damaged; it was trained with other casts than are to be evaluated; or its amax
                histories are those of other layers, or of another length.
        """
        trainer = None if self._trainer is None else self._trainer()
        self.overridden = overridden(self._asked, checkpoint, () if trainer is None else trainer.optimizers)
        warn_of(self.overridden)
        state = state_of(checkpoint)
        if state is None:
            rank_zero_warn(
                "The checkpoint holds no state of lightning_lowbit (saved without the plugin, or weights only): its "
                f"weights are loaded, and quantization starts anew at step {self.step}, in phase {self.phase!r}. If it "
                "was trained in another phase, call plugin.set_phase(...)."
                + (f" The loss scale starts at {self.scaler.get_scale():g}." if self.scaler is not None else "")
            )
            return
        if state["seed"] != self.seed:
            rank_zero_warn(
                f"The checkpoint's random bits are those of seed {state['seed']}, this run's of seed {self.seed}: it "
                f"will not repeat the uninterrupted run. Give seed={state['seed']} for that."
            )
        if self._scaling is not None:
            self._scaling.load_state_dict(state)
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        """Takes a state that has been checked, but for the loss scaler's."""
        self._converted.load_casts(state)
        if state.get("trained") is None:
            rank_zero_warn(
                f"The checkpoint holds {LACKING}: they are taken to be those of this plugin, {self.casts}. If it was "
                "trained with others, give the plugin those. A checkpoint saved from now on tells them."
            )
        else:
            self._compare(Trained.read(state["trained"]), "The checkpoint")
        if not self.fresh_histories:
            # Amaxes of output gradients are those under the checkpoint's scale of the loss; none is a scale of 1.
            # Lightning divides the loss by the number of micro-batches, of which more devices take fewer.
            before = state.get("scaler", {}).get("scale", 1.0) / state.get("accumulated", self._accumulated)
            after = (1.0 if self.scaler is None else self.scaler.get_scale()) / self._accumulated
            self._converted.load_histories(state, after / before if before > 0 else 1.0)
        self.step, self.micro_batch = state["step"], state["micro_batch"]
        self.set_phase(state["phase"])
        self.set_blend(float(state.get("blend", 1.0)))

    def _compare(self, trained: Trained, what: str) -> None:
        """Says what this plugin computes otherwise than it was trained; in evaluation that is an error.

        Raises:
            ValueError: in evaluation, unless ``casts_of_checkpoint`` is False.
        """
        here = self.trained
        differences = trained.differences(here)
        if trained.scaler != here.scaler and not self._is_evaluating:
            differences.append(f"the loss: scaled by {trained.scaler} in the checkpoint, by {here.scaler} here")
        if not differences:
            return
        told = f"{what} was trained otherwise than this plugin computes:\n  " + "\n  ".join(differences)
        if not self._is_evaluating:
            rank_zero_warn(f"{told}\nTraining goes on as this plugin has it.")
        elif self.casts_of_checkpoint:
            raise ValueError(
                f"{told}\nTo evaluate what was trained, use plugins=[LowBitPrecision.from_checkpoint(path)]; to "
                "evaluate it with the casts of this plugin, give this plugin casts_of_checkpoint=False."
            )
        else:
            rank_zero_info(f"{told}\nIt is evaluated with the casts of this plugin, as casts_of_checkpoint=False says.")

    def __getstate__(self) -> dict[str, Any]:
        """Without the Trainer: who pickles that has it already."""
        return {**vars(self), "_trainer": None}

    def teardown(self) -> None:
        """Says how many steps of a training were skipped; weights are gathered as they are again."""
        super().teardown()
        if self._shared is not None:  # nobody measures them any more
            self._shared.release()
            self._shared = None
        if self._gathers is not None:  # passes without the plugin may have another dtype
            self._gathers.release()
            self._gathers = None
        trainer = None if self._trainer is None else self._trainer()
        if self._scaling is not None and trainer is not None and trainer.state.fn == "fit":
            self._scaling.report(self.step)
