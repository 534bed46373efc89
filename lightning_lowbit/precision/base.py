"""The precision plugin: Lightning's hooks, and the arguments of a run.

convert_module          each linear layer becomes a QuantLinear, in place
train_step_context      autocast; random keys of this micro-batch; layers stage their amaxes
optimizer_step          counts the step; staged amaxes enter the histories

The plugin owns the layers (:class:`RunLayers`) and the rest of a run's state (:class:`RunState`).
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_lowbit._lightning import (
    FSDPPrecision,
    LightningModule,
    LightningOptimizer,
    MisconfigurationException,
    both_are_imported,
    goes_with,
    say_once,
)
from lightning_lowbit.checks import choose, flag, integer
from lightning_lowbit.distributed import clip_gradients_, clip_values_, connect, is_sharded
from lightning_lowbit.nn.attention.products import casts_of_attention, check_attention
from lightning_lowbit.nn.casts.linear_casts import SMOOTHINGS, LinearCasts
from lightning_lowbit.nn.conversion.context import ForwardContext
from lightning_lowbit.nn.conversion.convert import CastsLike, Selection, casts_by_pattern, check_backend, plan_by_name
from lightning_lowbit.nn.conversion.shared_amax import check_groups
from lightning_lowbit.nn.core.saving import check_save
from lightning_lowbit.nn.state.amax import AmaxHistories
from lightning_lowbit.patterns import checked_patterns, clean_name
from lightning_lowbit.precision.checkpoints.files import Checkpoint, load_checkpoint
from lightning_lowbit.precision.checkpoints.overridden import asked_options, explained, overridden, warn_overridden
from lightning_lowbit.precision.checkpoints.trained import Origin, Trained
from lightning_lowbit.precision.coverage_line import CoverageLine
from lightning_lowbit.precision.layers import RunLayers
from lightning_lowbit.precision.run_settings import (
    AS_TRAINED,
    ComputeDtype,
    check_whole_weights,
    checked_run,
    compute_dtype,
    data_rank,
    global_seed,
)
from lightning_lowbit.precision.shown import Shown, former_arguments
from lightning_lowbit.precision.state import RunState

__all__ = ["LowBitPrecision", "compute_dtype"]


def _delegated(part: str, name: str) -> Any:
    """Makes a property of the plugin that stands for one of its ``_layers`` or its ``_state``."""
    owner = attrgetter(part)
    return property(lambda plugin: getattr(owner(plugin), name), lambda plugin, new: setattr(owner(plugin), name, new))


class LowBitPrecision(Shown, FSDPPrecision):
    """Trains the linear layers of any ``LightningModule`` with the given casts.

    Args:
        casts: a preset's name, a :class:`LinearCasts`, or a mapping of its fields (with ``preset`` to start from one).
        skip: name patterns of layers to leave in high precision, e.g. ``["lm_head"]``; see ``convert``.
        only: name patterns of layers to convert; None for all.
        overrides: other casts for some layers, by name pattern.
        compute_dtype: the dtype of everything that is not quantized: ``"bf16"`` or ``"fp16"`` (autocast), ``"fp32"``,
            or their names in Lightning or torch. ``"auto"`` is bf16 if the devices of all processes have instructions
            for it, else float32; a run that loads a checkpoint takes the dtype in which that was trained. A CPU without
            instructions for the dtype computes products in float32 and rounds them. Operands are rounded to the dtype
            before they are quantized. Parameters keep their dtype.
        scaler: any ``torch.amp.GradScaler``, for ``"fp16"`` only; None for a ``ConservativeGradScaler``.
        seed: of stochastic rounding; None takes that of ``seed_everything``, or 0.
        exact: emulate GEMMs in float32 over exact operands, rounded once. Slow; for comparisons.
        backend: ``"auto"`` runs GEMMs of FP8, integers, NVFP4, MXFP4 and MXFP8 natively where the hardware can, and
            emulates all others. ``"native"`` raises instead of emulating. ``"emulated"`` emulates all.
        grouped: ``"native"`` multiplies the experts of a stack by one bf16 GEMM, see ``convert``; ``"auto"`` one after
            the other, or on CPUs as ``backend`` has it.
        save: ``"inputs"`` keeps the input of layers for the backward pass; ``"codes"`` keeps codes and scales of its
            quantized operand (4.5 bits in NVFP4), with the same gradients.
        smooth_swiglu: ``"channel"`` or ``"token"``, see :mod:`lightning_lowbit.nn.conversion.smooth_swiglu`.
        fresh_histories: start with empty amax histories, even if a checkpoint holds some.
        shared_amax: patterns of layers whose weights share an amax within a module, such as ``["(q|k|v)_proj"]``.
        quantize_before_gather: FSDP2 gathers codes and scales, see :mod:`lightning_lowbit.nn.sharded.gather`.
        casts_of_checkpoint: evaluating a checkpoint that was trained with other casts is an error; False allows it.
        attention: casts of attention's two products; None leaves them in high precision. See ``convert``.
        quantize_output: False leaves the output layer in high precision, see
            :mod:`lightning_lowbit.nn.conversion.defaults`, unless a pattern of ``only`` or ``overrides`` names it. None
            is False in FP4 and ternary plugins, but keeps it quantized if the checkpoint that a run loads has it so.

    Raises:
        ValueError: an argument is invalid, a pattern does not fit the model, or a checkpoint is damaged or has other
            casts.
        MisconfigurationException: used outside a Trainer, with DeepSpeed, or with an unsuitable scaler.

    Examples:
        >>> Trainer(plugins=[LowBitPrecision("nvfp4", skip=["lm_head"])])
    """

    leaves_output: ClassVar[bool] = False  # by default, with quantize_output=None

    seed: int = _delegated("_layers", "seed")
    exact: bool = _delegated("_layers", "exact")
    backend: str = _delegated("_layers", "backend")
    grouped: str = _delegated("_layers", "grouped")
    save: str = _delegated("_layers", "save")
    smooth_swiglu: str | None = _delegated("_layers", "smooth_swiglu")
    shared_amax: Iterable[str] = _delegated("_layers", "shared_amax")
    quantize_before_gather: bool = _delegated("_layers", "quantize_before_gather")
    blend: Tensor = _delegated("_layers", "blend")
    """λ, set by :meth:`set_blend`; 0-d."""
    is_blending: bool = _delegated("_layers", "is_blending")  # whether λ is below 1
    histories: AmaxHistories | None = _delegated("_layers", "histories")  # amaxes of previous steps
    step: int = _delegated("_layers", "step")  # optimizer steps taken
    micro_batch: int = _delegated("_layers", "micro_batch")  # training steps since then
    phase: str = _delegated("_layers", "phase")
    """The phase in force: the latest temporary one, or else that of :meth:`set_phase`."""
    compute_reason: str = _delegated("_state.compute", "reason")  # why ``compute_dtype`` is what it is
    scaler: GradScaler | None = _delegated("_state", "scaler")  # type: ignore[assignment]  # may be set between steps
    trained: Trained = _delegated("_state", "trained")  # the record that checkpoints hold
    fresh_histories: bool = _delegated("_state", "fresh_histories")
    casts_of_checkpoint: bool = _delegated("_state", "casts_of_checkpoint")

    def __init__(
        self,
        casts: CastsLike,
        *,
        skip: Iterable[str] = (),
        only: Iterable[str] | None = None,
        overrides: Mapping[str, CastsLike] | None = None,
        compute_dtype: str | int | torch.dtype = "auto",
        scaler: GradScaler | None = None,
        seed: int | None = None,
        exact: bool = False,
        backend: str = "auto",
        save: str = "inputs",
        smooth_swiglu: str | None = None,
        fresh_histories: bool = False,
        shared_amax: Iterable[str] = (),
        quantize_before_gather: bool = False,
        casts_of_checkpoint: bool = True,
        attention: CastsLike | None = None,
        quantize_output: bool | None = None,
        grouped: str = "auto",
    ) -> None:
        compute = ComputeDtype(compute_dtype)
        self._layers = RunLayers(
            global_seed() if seed is None else integer("seed", seed),
            exact=flag("exact", exact),
            backend=backend,
            save=save,
            smooth_swiglu=smooth_swiglu,
            shared_amax=checked_patterns("shared_amax", shared_amax),
            quantize_before_gather=flag("quantize_before_gather", quantize_before_gather),
            grouped=grouped,
        )
        self._state = RunState(self._layers, compute)
        self.fresh_histories = flag("fresh_histories", fresh_histories)
        self.casts_of_checkpoint = flag("casts_of_checkpoint", casts_of_checkpoint)
        FSDPPrecision.__init__(self, "bf16-mixed")  # "16-mixed" would create a scaler, which needs CUDA
        self.precision, self.scaler = compute.precision, scaler
        self.casts = LinearCasts.of(casts)
        self.overrides = casts_by_pattern(overrides)
        self.skip = checked_patterns("skip", skip)
        self.only = None if only is None else checked_patterns("only", only)
        self.attention = None if attention is None else check_attention("", casts_of_attention(attention))
        self.quantize_output = None if quantize_output is None else flag("quantize_output", quantize_output)
        if smooth_swiglu is not None:
            choose("kind of smooth_swiglu", smooth_swiglu, SMOOTHINGS)
        check_backend({"": self.casts, **self.overrides}, backend, exact, grouped=grouped)
        check_save({}, save)
        self.coverage_line = CoverageLine()
        self.overridden: list[str] = []  # options of this run that the checkpoint overrides
        self._asked = asked_options([], [])
        self._origin: Origin | None = None
        self._root: nn.Module | None = None
        self._is_sharded, self._rank, self._epoch = False, 0, -1  # the last epoch in which layers were looked at
        if both_are_imported():
            say_once(f"{goes_with(self)}.")

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, weights_only: bool = True, **changes: Any) -> "LowBitPrecision":
        """Makes the plugin that a checkpoint was trained with: the same casts of the same layers, whatever its class.

        In ``validate``, ``test`` and ``predict`` it also restores phase, λ and amaxes, with or without ``ckpt_path``,
        unless it has been trained.
        In ``fit`` it restores them only from ``ckpt_path``; without it, a new run begins.

        Args:
            checkpoint: a path to a file or a folder of shards, or the result of ``torch.load``.
            weights_only: as in ``torch.load``.
            **changes: arguments of :class:`LowBitPrecision` that do not change the results: ``scaler``,
                ``seed``, ``exact``, ``backend``, ``grouped``, ``save``, ``fresh_histories``,
                ``quantize_before_gather``, ``casts_of_checkpoint``.

        Raises:
            ValueError: the checkpoint has no record of its training or is damaged, or ``changes`` has another argument.

        Examples:
            >>> Trainer(plugins=[LowBitPrecision.from_checkpoint("last.ckpt")]).validate(model, ckpt_path="last.ckpt")
        """
        origin = Origin.read(load_checkpoint(checkpoint, weights_only))
        plugin = LowBitPrecision(**origin.arguments(changes))
        plugin._origin, plugin._arguments = origin, f"<of a checkpoint: {origin.trained}>"
        plugin._state.compute.reason = AS_TRAINED
        return plugin

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the attributes of a pickled plugin; of one of an earlier version, those that were arguments."""
        if "_layers" not in state:
            LowBitPrecision.__init__(self, **former_arguments(state, LowBitPrecision.__init__))
            state = {name: state[name] for name in ("_arguments", "_origin")}
        vars(self).update(state)

    @property
    def state_key(self) -> str:
        """Refuses a place among the callbacks, which a Trainer asks for this; a ``MisconfigurationException``."""
        raise MisconfigurationException(f"{self!r} is a plugin: give Trainer(plugins=[...]), and not callbacks=[...].")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of everything that is not quantized. For ``"auto"`` it is bf16 until a run decides."""
        return self._state.compute.dtype

    @property
    def skipped_steps(self) -> Tensor:
        """Optimizer steps skipped in fp16 because of a non-finite gradient; 0-d int64. ``step`` counts them too."""
        return torch.tensor(0, device="cpu") if self._state.scaling is None else self._state.scaling.skipped_steps

    def set_phase(self, phase: str) -> None:
        """Puts all layers into ``"fqt"``, ``"qaf"``, ``"hp-forward"`` or ``"bf16"``, and ends temporary phases."""
        self._layers.set_phase(phase)

    def push_phase(self, owner: str, phase: str | None) -> None:
        """Puts all layers into the temporary phase of an owner (a name); None leaves the phase below in force."""
        self._layers.push_phase(owner, phase)

    def pop_phase(self, owner: str) -> None:
        """Ends an owner's temporary phase, if it is still there."""
        self._layers.pop_phase(owner)

    def has_pushed(self, owner: str) -> bool:
        """Returns whether an owner's temporary phase is still there, so :meth:`set_phase` was not called since."""
        return self._layers.has_pushed(owner)

    def set_blend(self, value: float) -> None:
        """Sets λ, from 0 (high precision) to 1 (quantized).

        Operands that have a cast become ``x + λ (q(x) - x)``. Changing λ below 1 does not recompile. At 1, native GEMMs
        are used again. A number outside [0, 1] raises ``ValueError``.
        """
        self._layers.set_blend(value)

    def set_casts(self, casts: Mapping[str, CastsLike]) -> None:
        """Gives layers other casts; the phase still applies to them.

        Changed casts are saved in checkpoints. Training by another Trainer begins with those of the constructor.
        Delayed scaling and smoothing restart for the changed layers only.

        Args:
            casts: by name pattern (see :func:`lightning_lowbit.convert`; the first match counts), anything that
                :meth:`LinearCasts.of` takes, or a phase: the constructor's casts in this phase, so ``"fqt"`` restores
                them.

        Raises:
            ValueError: a pattern gives no converted layer its casts, a preset or phase does not exist, the backend has
                no native form of such casts, or layers could no longer share an amax. Nothing has changed then.
            MisconfigurationException: no model is converted yet; give ``overrides`` to the constructor.

        Examples:
            >>> trainer.precision_plugin.set_casts({"lm_head": "bf16", "down_proj": "nvfp4-4over6"})
        """
        self._layers.set_casts(casts)

    def resolve_casts(self, casts: Mapping[str, CastsLike]) -> dict[str, LinearCasts]:
        """Returns the casts by layer that :meth:`set_casts` would set, with the same errors."""
        return self._layers.resolve_casts(casts)

    def casts_of(self, pattern: str) -> dict[str, LinearCasts]:
        """Returns the casts by name of the layers that a pattern matches, in any phase; ``ValueError`` if none."""
        return self._layers.casts_of(pattern)

    def scale_gradients(self, factor: float) -> None:
        """Tells delayed scaling that ``training_step`` multiplies its loss by ``factor`` more than before.

        The amaxes of earlier output gradients are multiplied by it; without this, a larger loss saturates for some
        steps. ``accumulate_grad_batches`` and loss scalers are followed by themselves. Call it between steps.

        Raises:
            ValueError: the factor is not above 0.

        Examples:
            >>> trainer.precision_plugin.scale_gradients(8)  # the loss was divided by 8 until now
        """
        self._state.scale_gradients(factor)

    def expect_draws(self, on: bool = True) -> None:
        """Announces before a forward pass whether :meth:`another_draw` will follow."""
        self._layers.expect_draws(on)

    def another_draw(self, number: int = 0) -> AbstractContextManager[None]:
        """Context for another backward pass over the same graph, with other random bits for stochastic rounding.

        Call :meth:`expect_draws` before the forward pass. Records of this backward pass in layers and histories are
        discarded. ``number`` is the index of the draw, 0 or more; each has its own bits.

        Raises:
            MisconfigurationException: the forward pass did not record which random bits it used.
        """
        return self._layers.another_draw(number)

    def plan(self, model: nn.Module) -> dict[str, LinearCasts]:
        """Returns the casts of each layer by name, without changing the model. Raises the same errors as conversion."""
        return self._plan(model)[0]

    def _plan(self, model: nn.Module) -> tuple[dict[str, LinearCasts], frozenset[str]]:
        """Returns the casts of each layer by name, and the output layers that are left out, by clean names."""
        if self._origin is not None:
            planned, left = plan_by_name(model, self._origin.trained.planned), frozenset[str]()
        else:
            selection = Selection(model, self.casts, self.skip, self.only, self.overrides, self.attention)
            planned = selection.planned(selection.excluded, self.smooth_swiglu)
            leaves = self.leaves_output if self.quantize_output is None else not self.quantize_output
            left = self._state.outputs.select(planned, selection) if leaves else frozenset[str]()
            planned = {name: casts for name, casts in planned.items() if clean_name(name) not in left}
        if self.shared_amax:
            check_groups(planned, self.shared_amax)
        return planned, left

    def convert_module(self, module: nn.Module) -> nn.Module:
        trainer, module = checked_run(self, module)
        is_new = self._state.begin(trainer, module)
        self._layers.device, self._rank = trainer.strategy.root_device, data_rank(trainer)
        self._state.compute.decide(trainer.strategy)
        self.precision = self._state.compute.precision
        restored = getattr(getattr(ForwardContext.of(module), "enter", None), "trained", None)
        if restored is not None:
            self._follow(restored, self._plan(module)[1])
        self._convert(module)
        self._root = module
        if is_new:
            self.coverage_line.count(module)
        if self._origin is not None and self._state.runs.is_evaluating and not self._state.runs.is_trained:
            self._state.load(self._origin.state, self.casts)
        if restored is not None:
            self._state.compare(restored, "The model, restored from a checkpoint,")
        return module

    def _convert(self, module: nn.Module) -> None:
        planned, outputs = self._plan(module)
        self._layers.convert(module, planned, self.compute_dtype)
        self._state.outputs.note(outputs, module, type(self).__name__)

    def convert_input(self, data: Any) -> Any:
        """Leaves batches unchanged, as Lightning's ``bf16-mixed`` does. (The FSDP plugin would cast them.)"""
        return data

    def forward_context(self) -> AbstractContextManager[None]:
        self._state.runs.check()
        is_average = self._state.runs.has_averages and not self._state.runs.trainer.training
        return self._layers.forward_context(self.compute_dtype, self._rank, not is_average)

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Returns the forward context with the random bits of this micro-batch, which its backward pass uses too."""
        with self.forward_context(), self._state.hearing(True):
            epoch = self._state.runs.trainer.current_epoch
            if epoch != self._epoch:
                self._epoch = epoch
                self._layers.report_changes()
            self.coverage_line.say(self._state.runs.trainer, self.phase)
            self._state.follow_loss()
            self._layers.record(True)
            yield
        if not self._state.is_automatic:  # manual backward passes and steps ran in the context
            self._layers.record(False)
            self._state.end_manual_step()
        self.micro_batch += 1

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scales the loss in fp16. In manual optimization, the first backward pass after a step updates the scale."""
        self._state.before_backward(self._is_sharded)
        return super().pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: LightningModule, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Runs the backward pass in this thread: in another, the Python of layers takes up to twice as long."""
        with self._layers.products(), torch.autograd.set_multithreading_enabled(False):
            super().backward(tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Stops recording only now: activation checkpointing runs forward passes within the backward pass."""
        self._state.after_backward()
        if self._state.is_automatic:
            self._layers.record(False)
        return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """Steps, counts the step, and moves staged amaxes into the histories."""
        with self._state.hearing(False), explained(optimizer):
            if self._state.scaling is None:
                result = super().optimizer_step(optimizer, model, closure, **kwargs)
            else:
                closure()
                self._state.unscale_(optimizer, self._is_sharded)
                self._after_closure(model, optimizer)
                result = self._state.scaling.step(optimizer, **kwargs)
                if self._state.is_automatic:
                    self._state.update_scale()
        self._state.count_step()
        self.coverage_line.warn(self._state.runs.trainer, self._layers)
        if self._state.is_automatic:  # also if there was no backward pass
            self._layers.record(False)
        return result

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Keeps the wrapped model: only the root module of FSDP1 can compute the norm of flat gradients."""
        self._root, self._is_sharded = model, is_sharded(model)
        connect(model)
        self._state.hear_steps(optimizers)
        self._asked, self.overridden = asked_options(optimizers, lr_schedulers), []
        if self.shared_amax:
            check_whole_weights(model)
        return super().connect(model, optimizers, lr_schedulers)

    def clip_gradients(self, optimizer: Any, clip_val: int | float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Unscales the gradients, then clips them. (In manual optimization, clipping comes before the step.)"""
        if clip_val > 0:
            wrapped = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
            self._state.unscale_(wrapped, self._is_sharded)
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        clip_gradients_(list(self.main_params(optimizer)), clip_val, self._root, self._is_sharded)

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        if self._is_sharded:  # torch takes gradients of one mesh alone, and no pending sums
            clip_values_(list(self.main_params(optimizer)), clip_val)
        else:
            super().clip_grad_by_value(optimizer, clip_val)

    def state_dict(self) -> dict[str, Any]:
        """Empty: Lightning would save it under the class name. See :meth:`on_save_checkpoint`."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._state.save(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes what the arguments leave open, and loads the state; ``ValueError`` if it does not fit the model."""
        trained, model = Trained.of(checkpoint), self._layers.model
        if trained is not None and model is not None and self._follow(trained, self._state.outputs.left):
            self.histories = None
            self._layers.release(in_use=True)
            self._convert(model)
            self.coverage_line.count(model)
        trainer = self._state.runs.trainer
        self.overridden = overridden(self._asked, checkpoint, () if trainer is None else trainer.optimizers)
        warn_overridden(self.overridden)
        self._state.load_checkpoint(checkpoint, self.casts)

    def _follow(self, trained: Trained, left: frozenset[str]) -> bool:
        """Takes from a record what the arguments leave open; returns whether that changes a plan without ``left``."""
        has_dtype = isinstance(self._root, FullyShardedDataParallel)  # FSDP1 has been given one
        is_other = not has_dtype and self._state.compute.follow(trained.compute_dtype, self._layers.device)
        self.precision = self._state.compute.precision
        if self.quantize_output is None:
            is_other |= self._state.outputs.follow(trained, left, type(self).__name__)
        return is_other

    def teardown(self) -> None:
        """Logs how many steps were skipped, and restores FSDP's own gathering of weights."""
        super().teardown()
        self._layers.report_changes()
        self._layers.release(in_use=not self._state.runs.has_averages)
        self._state.report()
