"""The precision plugin: it converts a model's linear layers and keeps the state that quantization needs.

convert_module          each linear layer becomes a QuantLinear, in place
train_step_context      autocast; random keys of this micro-batch; layers stage their amaxes
optimizer_step          counts the step; staged amaxes enter the histories
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

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
from lightning_lowbit.distributed import clip_gradients_, connect, is_flat, is_sharded
from lightning_lowbit.nn.attention.products import casts_of_attention, check_attention
from lightning_lowbit.nn.casts.linear_casts import SMOOTHINGS, LinearCasts
from lightning_lowbit.nn.conversion.context import ForwardContext
from lightning_lowbit.nn.conversion.convert import CastsLike, casts_by_pattern, check_backend
from lightning_lowbit.nn.core.saving import check_save
from lightning_lowbit.precision.checkpoints.files import Checkpoint, load_checkpoint
from lightning_lowbit.precision.checkpoints.overridden import asked_options
from lightning_lowbit.precision.checkpoints.planned import PlannedLayers
from lightning_lowbit.precision.checkpoints.trained import Origin, check_changes
from lightning_lowbit.precision.coverage_line import CoverageLine
from lightning_lowbit.precision.run_settings import as_list, compute_dtype, data_rank, global_seed, run_of
from lightning_lowbit.precision.shown import Shown

if TYPE_CHECKING:
    from lightning_lowbit.nn.sharded.gather import WeightGathers

__all__ = ["LowBitPrecision", "compute_dtype"]


class LowBitPrecision(Shown, PlannedLayers, FSDPPrecision):  # type: ignore[misc]  # `scaler` is a property here
    """Trains the linear layers of any ``LightningModule`` with the given casts.

    Args:
        casts: a preset's name, a :class:`LinearCasts`, or a mapping of its fields (with ``preset`` to start from one).
        skip: name patterns of layers to leave in high precision, e.g. ``["lm_head"]``; see :func:`convert`.
        only: name patterns of layers to convert; None for all.
        overrides: other casts for some layers, by name pattern.
        compute_dtype: the dtype of everything that is not quantized: ``"bf16"`` or ``"fp16"`` (autocast), ``"fp32"``,
            or their names in Lightning or torch. ``"auto"`` is bf16 if the devices of all processes have instructions
            for it, else float32; a run that loads a checkpoint takes the dtype in which that was trained. Operands are
            rounded to it before they are quantized. Parameters keep their dtype.
        scaler: any ``torch.amp.GradScaler``, for ``"fp16"`` only; None for a :class:`ConservativeGradScaler`.
        seed: of stochastic rounding; None takes that of ``seed_everything``, or 0.
        exact: emulate GEMMs in float32 over exact operands, rounded once. Slow; for comparisons.
        backend: ``"auto"`` runs GEMMs of FP8, integers, NVFP4, MXFP4 and MXFP8 natively where the hardware can, and
            emulates all others. ``"native"`` raises instead of emulating. ``"emulated"`` emulates all.
        save: what layers keep of their input for the backward pass: ``"inputs"``, the tensor, or ``"codes"``, codes and
            scales of its quantized operand (4.5 bits in NVFP4), with the same gradients.
        smooth_swiglu: ``"channel"`` or ``"token"``, see :mod:`lightning_lowbit.nn.conversion.smooth_swiglu`.
        fresh_histories: start with empty amax histories, even if a checkpoint holds some.
        shared_amax: patterns of layers whose weights share an amax within a module, such as ``["(q|k|v)_proj"]``.
        quantize_before_gather: FSDP2 gathers codes and scales, see :mod:`lightning_lowbit.nn.sharded.gather`.
        casts_of_checkpoint: evaluating a checkpoint that was trained with other casts is an error; False allows it.
        attention: casts of attention's two products; None leaves them in high precision. See :func:`convert`.
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
    ) -> None:
        PlannedLayers.__init__(self, compute_dtype, quantize_output)
        FSDPPrecision.__init__(self, "bf16-mixed")  # "16-mixed" would create a scaler, which needs CUDA
        self.precision = self._compute.precision
        self.scaler = scaler
        self.casts = LinearCasts.of(casts)
        self.overrides = casts_by_pattern(overrides)
        self.skip, self.only = as_list(skip), None if only is None else as_list(only)
        self.shared_amax = as_list(shared_amax)
        self.seed = global_seed() if seed is None else integer("seed", seed)
        self.exact = flag("exact", exact)
        self.backend, self.save, self.smooth_swiglu = backend, save, smooth_swiglu
        self.fresh_histories = flag("fresh_histories", fresh_histories)
        self.quantize_before_gather = flag("quantize_before_gather", quantize_before_gather)
        self.casts_of_checkpoint = flag("casts_of_checkpoint", casts_of_checkpoint)
        self.attention = None if attention is None else casts_of_attention(attention)
        if smooth_swiglu is not None:
            choose("kind of smooth_swiglu", smooth_swiglu, SMOOTHINGS)
        check_backend({"": self.casts, **self.overrides}, backend, exact)
        check_save({}, save)
        if self.attention is not None:
            check_attention("", self.attention)
        self.coverage_line = CoverageLine()
        self._root: nn.Module | None = None
        self._is_sharded = False
        self._rank = 0
        self._gathers: WeightGathers | None = None
        if both_are_imported():
            say_once(f"{goes_with(self)}.")

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, weights_only: bool = True, **changes: Any) -> "LowBitPrecision":
        """Makes the plugin that a checkpoint was trained with: the same casts of the same layers, whatever its class.

        In ``validate``, ``test`` and ``predict`` it also restores phase, λ and amaxes, with or without ``ckpt_path``.
        In ``fit`` it restores them only from ``ckpt_path``; without it, a new run begins.

        Args:
            checkpoint: a path to a file or a folder of shards, or what ``torch.load`` returned.
            weights_only: as in ``torch.load``.
            **changes: arguments of :class:`LowBitPrecision` that do not change what the model computes: ``scaler``,
                ``seed``, ``exact``, ``backend``, ``save``, ``fresh_histories``, ``quantize_before_gather``,
                ``casts_of_checkpoint``.

        Raises:
            ValueError: the checkpoint has no record of its training or is damaged, or ``changes`` has another argument.

        Examples:
            >>> Trainer(plugins=[LowBitPrecision.from_checkpoint("last.ckpt")]).validate(model, ckpt_path="last.ckpt")
        """
        origin = Origin.read(load_checkpoint(checkpoint, weights_only))
        plugin = LowBitPrecision(**{**origin.arguments(), **check_changes(changes)})
        plugin._origin, plugin._arguments = origin, f"<of a checkpoint: {origin.trained}>"
        return plugin

    def __str__(self) -> str:
        # If the Trainer belongs to the other Lightning, its error message quotes this.
        return f"{self!r} ({goes_with(self)})" if both_are_imported() else repr(self)

    @property
    def skipped_steps(self) -> Tensor:
        """Optimizer steps skipped in fp16 because of a non-finite gradient; 0-d int64. ``step`` counts them too."""
        return torch.tensor(0, device="cpu") if self._scaling is None else self._scaling.skipped_steps

    def convert_module(self, module: nn.Module) -> nn.Module:
        trainer, module = run_of(self, module)
        if self._take_up(trainer, module):
            self.coverage_line.restart()
        if self._scaling is not None:
            self._scaling.check(module, type(trainer.strategy).__name__)
        self._device, self._rank = trainer.strategy.root_device, data_rank(trainer)
        self._decide_dtype(trainer.strategy)
        restored = getattr(getattr(ForwardContext.of(module), "enter", None), "trained", None)
        if restored is not None:
            self._follow(restored, self._plan(module)[1])
        self._convert_as_planned(module)
        if self._origin is not None and self._is_evaluating:
            self._load(self._origin.state)
        if restored is not None:
            self._compare(restored, "The model, restored from a checkpoint,")
        return module

    def _convert_as_planned(self, module: nn.Module) -> None:
        planned, outputs = self._plan(module)
        check_backend(planned, self.backend, self.exact, self._device)  # raises before the model is changed
        check_save(planned, self.save)
        if self.quantize_before_gather:
            # imports private parts of FSDP2
            from lightning_lowbit.nn.sharded.gather import WeightGathers, check_gathers

            check_gathers(module, planned, self._autocast_dtype)
        self._convert(module, planned, self.seed)
        self._root = module
        if self.quantize_before_gather:
            self._gathers = WeightGathers(module, self._autocast_dtype, planned)
        self._note_outputs(outputs, module)

    def convert_input(self, data: Any) -> Any:
        """Leaves batches unchanged, as Lightning's ``bf16-mixed`` does. (The FSDP plugin would cast them.)"""
        return data

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        self._runs.check()
        is_average = self._has_averages and not self._run.training
        self._prepare(self.step, self.micro_batch, self._rank, in_use=not is_average)
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
        """The forward context with the random bits of this micro-batch, which its backward pass uses too."""
        with self.forward_context():
            if self._run.current_epoch != self._epoch:
                self._epoch = self._run.current_epoch
                self._say_what_has_changed()
            self._follow_loss()
            self._record(True)
            yield
        if not self._is_automatic:  # manual backward passes and steps ran in the context
            self._record(False)
            self._update_scale()
            self.coverage_line.say(self._run)
        self.micro_batch += 1

    @contextmanager
    def another_draw(self, number: int = 0) -> Generator[None, None, None]:
        """Context for another backward pass over the same graph, with other random bits for stochastic rounding.

        Call :meth:`expect_draws` before the forward pass. What this backward pass records in layers and histories is
        discarded. ``number`` is the index of the draw, 0 or more; each has its own bits.

        Raises:
            MisconfigurationException: the forward pass did not record which random bits it used.
        """
        with self._other_keys(number):
            yield

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scales the loss in fp16. In manual optimization, the first backward pass after a step updates the scale."""
        self._update_scale()
        self.coverage_line.see(tensor, module, self.phase == "fqt")
        return super().pre_backward(tensor, module)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Stops recording only now: activation checkpointing runs forward passes within the backward pass."""
        if self._is_automatic:
            self._record(False)
            self.coverage_line.say(self._run)
        return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """Steps and counts the step. One collective for all layers moves staged amaxes into the histories."""
        if self._scaling is None:
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
        else:
            closure()
            self._unscale_(optimizer)
            self._after_closure(model, optimizer)
            result = self._scaling.step(optimizer, **kwargs)
            if self._is_automatic:
                self._update_scale()
        torch.clear_autocast_cache()  # in manual optimization the context goes on, with copies of the weights before
        self.step += 1
        self.micro_batch = 0
        self._advance_histories()
        if self._gathers is not None:
            self._gathers.forget()
        self._share_amaxes()
        if self._is_automatic:  # also if there was no backward pass
            self._record(False)
        return result

    def _unscale_(self, optimizer: Any) -> None:
        if self._scaling is not None:
            self._scaling.unscale_(optimizer, self._device, self._is_sharded)

    def _update_scale(self) -> None:
        if self._scaling is not None:
            self._scaling.update()
            self._follow_loss()

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Keeps the wrapped model: only the root module of FSDP1 can compute the norm of flat gradients."""
        self._root, self._is_sharded = model, is_sharded(model)
        connect(model)
        self._asked, self.overridden = asked_options(optimizers, lr_schedulers), []
        if self.shared_amax and any(is_flat(parameter) for parameter in model.parameters()):
            raise MisconfigurationException(
                "shared_amax needs whole weights between steps, and FSDP1 keeps flat buffers alone. Train with "
                "FSDPStrategy(use_orig_params=True), its default, or with ModelParallelStrategy (FSDP2)."
            )
        return super().connect(model, optimizers, lr_schedulers)

    def clip_gradients(self, optimizer: Any, clip_val: int | float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Unscales the gradients, then clips them. (In manual optimization, clipping comes before the step.)"""
        if clip_val > 0:
            self._unscale_(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        clip_gradients_(list(self.main_params(optimizer)), clip_val, self._root, self._is_sharded)

    def teardown(self) -> None:
        """Logs how many steps were skipped, and restores FSDP's own gathering of weights."""
        super().teardown()
        self._say_what_has_changed()
        self._release(in_use=not self._has_averages)
        if self._gathers is not None:  # later passes without the plugin may use another dtype
            self._gathers.release()
            self._gathers = None
        if self._scaling is not None and self._run is not None and self._run.state.fn == "fit":
            self._scaling.report(self.step)
