"""The state of a run. Checkpoints hold it under one key, as tensors and primitives that are the same on all ranks."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit._lightning import (
    LightningModule,
    MisconfigurationException,
    rank_zero_info,
    rank_zero_warn,
    say_once,
    trains_elsewhere,
)
from lightning_lowbit.checks import positive, some
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import Selection
from lightning_lowbit.nn.conversion.defaults import mark_outputs
from lightning_lowbit.nn.conversion.reasons import Reasons
from lightning_lowbit.patterns import clean_name
from lightning_lowbit.precision.checkpoints.files import CHECKPOINT_KEY, state_of
from lightning_lowbit.precision.checkpoints.trained import LACKING, Trained
from lightning_lowbit.precision.grad_scalers import overflow
from lightning_lowbit.precision.layers import RunLayers
from lightning_lowbit.precision.loss_scaling import LossScaling, scaler_for
from lightning_lowbit.precision.run_settings import ComputeDtype, Runs

_MANY = 100  # training steps without a step of an optimizer


class OutputLayers:
    """The output layers of a run that are left in high precision, by default or as in its checkpoint."""

    def __init__(self) -> None:
        self.left = frozenset[str]()  # names of those that the converted model leaves in high precision
        self.restart()

    def restart(self) -> None:
        self._quantized = frozenset[str]()  # in the checkpoint
        self._left_before = frozenset[str]()  # left in high precision in the checkpoint

    @property
    def is_followed(self) -> bool:
        """True if a checkpoint decided."""
        return bool(self._quantized or self._left_before)

    def select(self, planned: Mapping[str, LinearCasts], selection: Selection) -> frozenset[str]:
        """Returns the clean names of the output layers to leave out of a plan, by default or as in the checkpoint."""
        outputs = planned.keys() & selection.excluded_with_outputs
        left = frozenset(map(clean_name, outputs)) - self._quantized
        return left | (self._left_before & {clean_name(name) for name in planned})

    def note(self, left: frozenset[str], model: nn.Module, plugin: str) -> None:
        """Keeps, marks and logs the output layers that a plugin (its name) leaves out."""
        self.left = left
        mark_outputs(model, left)
        if left:
            layers, it = ("layers", "them") if len(left) > 1 else ("layer", "it")
            say_once(
                f"{plugin} leaves the output {layers} {some(sorted(left))} in high precision (quantize_output=True "
                f"quantizes {it})."
            )

    def follow(self, trained: Trained, left: frozenset[str], plugin: str) -> bool:
        """Takes the decision of a checkpoint; returns whether that changes a plan, which would leave out ``left``."""
        before, left_before = self._quantized, self._left_before
        quantized = {name for name, casts in trained.planned.items() if casts != LinearCasts()}
        self._quantized, self._left_before = (left | before) & quantized, frozenset(trained.outputs)
        if new := self._quantized - before:
            rank_zero_info(
                f"The checkpoint was trained with {some(sorted(new))} quantized: it stays so, although {plugin} by "
                "default leaves it in high precision (as quantize_output=False does)."
            )
        return self._quantized != before or not self._left_before <= left | left_before


class RunState:
    """The state of one run after another of a plugin, saved in checkpoints and loaded from them."""

    def __init__(self, layers: RunLayers, compute: ComputeDtype) -> None:
        self.layers, self.compute = layers, compute
        self.fresh_histories, self.casts_of_checkpoint = False, True
        self.outputs, self.runs = OutputLayers(), Runs()
        self.scaling: LossScaling | None = None  # except in fp16
        self._hears_steps = self._has_warned = False

    @property
    def scaler(self) -> GradScaler | None:
        return None if self.scaling is None else self.scaling.scaler

    @scaler.setter
    def scaler(self, scaler: GradScaler | None) -> None:
        selected, before = scaler_for(self.compute, scaler), self.scaling
        self.scaling = None if selected is None else LossScaling(selected)
        if self.scaling is not None and before is not None:
            self.scaling.skipped_steps = before.skipped_steps

    @property
    def is_automatic(self) -> bool:
        """True if Lightning runs the backward passes and optimizer steps."""
        model = self.layers.model
        return not isinstance(model, LightningModule) or model.automatic_optimization

    @property
    def _accumulated(self) -> int:
        """The number of micro-batches by which Lightning divides each loss; in manual optimization the user does."""
        trainer = self.runs.trainer
        return int(trainer.accumulate_grad_batches) if trainer is not None and self.is_automatic else 1

    @property
    def _has_state(self) -> bool:
        """True if evaluation depends on more than weights and constructor."""
        return self.layers.has_state or self.outputs.is_followed or self.compute.is_followed

    def begin(self, trainer: Any, model: nn.Module) -> bool:
        """Goes on with a run or begins another one; returns whether it begins one."""
        is_first = self.runs.is_first()
        is_new = not self.runs.go_on(trainer, model, self._has_state, bool(self.layers.histories))
        if is_new and not is_first:
            for part in (self.layers, self.outputs, self.compute):
                part.restart()
        if is_new and self.scaling is not None:
            self.scaling.restart()  # also at first: another plugin may have used this scaler
        if self.scaling is not None:
            self.scaling.check(model, type(trainer.strategy).__name__)
        if not self.runs.is_evaluating:  # other processes may have made theirs after another seed_everything
            self.layers.seed = trainer.strategy.broadcast(self.layers.seed)
        self._keep_from_checkpoints(is_new)
        self.layers.expect(model)
        return is_new

    def _keep_from_checkpoints(self, is_new: bool) -> None:
        """Keeps the state from checkpoints that are evaluated: training goes on with the state before them."""
        runs, parts = self.runs, (self.layers, self.outputs, self.compute)
        if runs.is_of_checkpoint and not is_new and not runs.is_evaluating:
            for part, before in zip(parts, runs.before["parts"], strict=True):
                vars(part).update(before)
            self.layers.set_blend(runs.before["blend"])
        if is_new or not runs.is_evaluating:
            runs.is_of_checkpoint = False
        if not runs.is_of_checkpoint:
            layers = {name: vars(self.layers)[name] for name in self.layers.OF_A_RUN}
            attributes = [layers, dict(vars(self.outputs)), dict(vars(self.compute))]
            runs.before = {"parts": attributes, "blend": float(self.layers.blend)}

    def follow_loss(self) -> None:
        """Lets the amaxes of output gradients follow the factor of the loss, of which this is the only account."""
        if self.layers.histories:
            self.layers.histories.follow_((1.0 if self.scaling is None else self.scaling.scale) / self._accumulated)

    def scale_gradients(self, factor: float) -> None:
        positive("factor", factor, "what the loss has grown by")
        if self.layers.histories:
            self.layers.histories.scale_gradients_(torch.tensor(float(factor), device="cpu"))

    def update_scale(self) -> None:
        """Updates the loss scale after the optimizers have stepped."""
        if self.scaling is not None:
            self.scaling.update()
            self.follow_loss()

    def before_backward(self, over_ranks: bool) -> None:
        """Updates the loss scale if an optimizer has stepped; ``over_ranks``: all ranks must call this."""
        self.update_scale()
        if self.scaling is not None:
            self.scaling.before_backward(over_ranks)

    def hear_steps(self, optimizers: Iterable[Any]) -> None:
        """Hears in manual optimization of steps that optimizers take themselves: Lightning does not tell of them."""
        for handle in self.runs.handles:
            handle.remove()
        targets = [] if self.is_automatic else [o for o in optimizers if isinstance(o, torch.optim.Optimizer)]
        self.runs.handles = [optimizer.register_step_pre_hook(self._check_step) for optimizer in targets]
        self.runs.handles += [optimizer.register_step_post_hook(self._hear_step) for optimizer in targets]
        self._has_warned = False

    @contextmanager
    def hearing(self, on: bool) -> Generator[None, None, None]:
        """Context in which steps that optimizers take themselves are heard, or not."""
        before, self._hears_steps = self._hears_steps, on
        try:
            yield
        finally:
            self._hears_steps = before

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._hears_steps and self.scaling is not None and overflow(self.scaling.scaler, optimizer) is None:
            raise MisconfigurationException(
                f"compute_dtype='fp16' scales the loss, and {type(optimizer).__name__}, which steps itself (as with "
                "use_pl_optimizer=False), would take scaled gradients. Step what self.optimizers() returns, or train "
                "with compute_dtype='bf16' or 'fp32'."
            )

    def _hear_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._hears_steps:
            self.count_step()
            self._warn_once(
                f"{type(optimizer).__name__} steps itself, as with use_pl_optimizer=False. The plugin counts that, but "
                "Lightning does not: global_step stays, and nothing acts that waits for a step, such as max_steps and "
                "PrecisionSwitch. Step what self.optimizers() returns."
            )

    def count_step(self) -> None:
        """Counts an optimizer step: amaxes enter the histories."""
        torch.clear_autocast_cache()  # in manual optimization the context goes on, with copies of the weights before
        self.layers.advance()

    def end_manual_step(self) -> None:
        """Ends a training step of manual optimization, and warns if no optimizer has stepped for long."""
        self.update_scale()
        batches = self.layers.micro_batch + 1
        if self.layers.step == 0 and (batches == _MANY or self.runs.trainer.is_last_batch):
            self._warn_once(
                f"No optimizer step was counted in {batches} training steps: delayed scaling, and whatever waits for a "
                "step, do not advance. Return the optimizers from configure_optimizers, and step what "
                "self.optimizers() returns."
            )

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            rank_zero_warn(text)
        self._has_warned = True

    def after_backward(self) -> None:
        if self.scaling is not None:
            self.scaling.after_backward()

    def unscale_(self, optimizer: Any, over_ranks: bool) -> None:
        """Divides the gradients of an optimizer by the loss scale, if they are scaled."""
        if self.scaling is not None:
            self.scaling.unscale_(optimizer, self.layers.device, over_ranks)

    def report(self) -> None:
        """Logs how many steps of a training were skipped, and warns if its state ends with this process."""
        trainer = self.runs.trainer
        if trainer is None or trainer.state.fn != "fit":
            return
        if self.scaling is not None:
            self.scaling.report(self.layers.step)
        if self._has_state and trains_elsewhere(trainer):
            rank_zero_warn(
                "The processes that trained end now. The one that started them gets the weights alone: phase, λ, casts "
                "and amaxes stay there as they were. Evaluate a checkpoint (ckpt_path), or train with strategy='ddp'."
            )

    @property
    def trained(self) -> Trained:
        """The record of this training that checkpoints hold, with the names that layers have now."""
        layers, model, present = self.layers, self.layers.model, self.layers.present
        current = {} if model is None else {module: clean_name(name) for name, module in model.named_modules()}
        names = {name: current.get(layer, name) for name, layer in present.items()}  # an insertion renames layers
        started = [name for name in layers.changed if name in names and name in layers.planned]
        return Trained(
            {names[name]: layer.full_casts for name, layer in present.items()},
            self.compute.name,
            layers.smooth_swiglu,
            (*layers.shared_amax,),
            layers.exact,
            layers.backend,
            None if self.scaler is None else type(self.scaler).__name__,
            {names[name]: layers.planned[name] for name in started},
            (*sorted(self.outputs.left),),
            layers.grouped,
        )

    def save(self, checkpoint: dict[str, Any]) -> None:
        state = self.layers.state_dict()
        if self.layers.histories:
            state |= {"ranks": self.runs.ranks, "averaged": self.runs.has_averages}
        if self.scaling is not None:
            state |= self.scaling.state_dict()
        checkpoint[CHECKPOINT_KEY] = state | {"trained": self.trained.record()}

    def load_checkpoint(self, checkpoint: Mapping[str, Any], casts: LinearCasts) -> None:
        """Loads the state of a checkpoint, if it has one, for a plugin with these casts."""
        state, layers = state_of(checkpoint), self.layers
        if state is None:
            self.runs.restored(layers.model)
            scale = f" The loss scale starts at {self.scaler.get_scale():g}." if self.scaler is not None else ""
            rank_zero_warn(
                "The checkpoint holds no state of lightning_lowbit (saved without the plugin, or weights only): its "
                f"weights are loaded, and quantization starts at step {layers.step}, in phase {layers.phase!r}. If it "
                f"was trained in another phase, call plugin.set_phase(...).{scale}"
            )
            return
        if state["seed"] != layers.seed:
            rank_zero_warn(
                f"The checkpoint's random bits are those of seed {state['seed']}, this run's of seed {layers.seed}: it "
                f"will not repeat the uninterrupted run. Give seed={state['seed']} for that."
            )
        if self.scaling is not None and not self.runs.is_evaluating:
            self.scaling.load_state_dict(state)
        self.load(state, casts)

    def load(self, state: Mapping[str, Any], casts: LinearCasts) -> None:
        """Loads a validated state but for the loss scale; ``ValueError`` if it does not fit the model."""
        self.runs.restored(self.layers.model)
        self.layers.load_casts(state)
        if state.get("trained") is None:
            rank_zero_warn(
                f"The checkpoint holds {LACKING}: they are taken to be those of this plugin, {casts}. If it was "
                "trained with others, give the plugin those. A checkpoint saved from now on tells them."
            )
        else:
            self.compare(Trained.read(state["trained"]), "The checkpoint")
        if self.layers.histories and not self.fresh_histories:
            self.runs.warn_of_ranks(state.get("ranks", self.runs.ranks))
        is_average = state.get("averaged", False) and (self.runs.is_evaluating or not self.runs.has_averages)
        self.layers.load_state_dict(state, not self.fresh_histories and not is_average, self._accumulated)

    def compare(self, trained: Trained, what: str) -> None:
        """Reports how this run differs from a recorded training (of ``what``); in evaluation as an error by default."""
        here, is_evaluating = self.trained, self.runs.is_evaluating
        differences = trained.differences(here)
        if trained.scaler != here.scaler and not is_evaluating:
            differences.append(f"the loss: scaled by {trained.scaler} in the checkpoint, by {here.scaler} here")
        if not differences:
            return
        message = f"{what} was trained otherwise than this plugin computes:\n  " + "\n  ".join(differences)
        model = self.layers.model
        defaults = {} if model is None else Reasons(model).defaults
        if names := [name for name in defaults if trained.layers.get(name, LinearCasts()) != LinearCasts()]:
            message += f"\nBy default {some(names)} stay in high precision: name them in overrides or only to quantize "
            message += "them."
        if not is_evaluating:
            rank_zero_warn(f"{message}\nTraining continues as this plugin has it.")
        elif self.casts_of_checkpoint:
            raise ValueError(
                f"{message}\nTo evaluate what was trained, use plugins=[LowBitPrecision.from_checkpoint(path)] (lowbit "
                "does, without options of casts); to evaluate it with the casts of this plugin, give it "
                "casts_of_checkpoint=False."
            )
        else:
            rank_zero_info(
                f"{message}\nIt is evaluated with the casts of this plugin, as casts_of_checkpoint=False says."
            )
