"""The plugin's state in a checkpoint: tensors and primitives under one key, the same on all ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit._lightning import LightningModule, rank_zero_info, rank_zero_warn
from lightning_lowbit.checks import positive, some
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.reasons import Reasons
from lightning_lowbit.precision.checkpoints.files import CHECKPOINT_KEY, state_of
from lightning_lowbit.precision.checkpoints.overridden import asked_options, overridden, warn_of
from lightning_lowbit.precision.checkpoints.trained import LACKING, Origin, Trained, primitive
from lightning_lowbit.precision.layers import ConvertedLayers
from lightning_lowbit.precision.loss_scaling import LossScaling, scaler_for
from lightning_lowbit.precision.run_settings import ComputeDtype, Runs, averaging_of


class SavedLayers(ConvertedLayers):
    """The part of :class:`LowBitPrecision` that checkpoints save: converted layers, counters and the loss scale."""

    # Set by the plugin.
    casts: Any
    seed: int
    fresh_histories: bool
    casts_of_checkpoint: bool
    _compute: ComputeDtype

    def __init__(self) -> None:
        super().__init__()
        self.step = 0  # optimizer steps taken
        self.micro_batch = 0  # training steps since then
        self._asked = asked_options([], [])
        self.overridden: list[str] = []  # options of this run that the checkpoint overrides
        self._origin: Origin | None = None
        self._scaling: LossScaling | None = None
        self._left: frozenset[str] = frozenset()  # output layers that are left out by default
        self._runs = Runs()
        self._epoch = -1  # the last one in which layers were looked at

    @property
    def _run(self) -> Any:
        """The Trainer."""
        return self._runs.trainer

    @property
    def _is_evaluating(self) -> bool:
        return self._runs.is_evaluating

    def _take_up(self, trainer: Any, model: nn.Module) -> bool:
        """Goes on with a run, or begins another one, and returns whether it does."""
        is_first = self._runs.is_first()
        is_new = not self._runs.go_on(trainer, model, self._has_state, bool(self.histories))
        if is_new and not is_first:
            self.step, self.micro_batch = 0, 0
            self._start_afresh()
        if is_new and self._scaling is not None:
            self._scaling.restart()  # also at first: another plugin may have used this scaler
        self._expect(model)
        return is_new

    @property
    def _has_state(self) -> bool:
        """Whether evaluation depends on anything but weights and constructor: phase, λ, casts, amaxes."""
        is_changed = self.phase != "fqt" or bool(self._temporary or self._changed or self._followed)
        return is_changed or float(self.blend) != 1.0 or bool(self.histories)

    @property
    def _followed(self) -> bool:
        """Whether the plugin has settings of a checkpoint."""
        return False

    @property
    def _has_averages(self) -> bool:
        """Whether a callback evaluates, saves and leaves averages of weights, which the histories have not seen."""
        return self._run is not None and averaging_of(self._run) is not None

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, for ``compute_dtype="fp16"`` only. Another one may be set between steps."""
        return None if self._scaling is None else self._scaling.scaler

    @scaler.setter
    def scaler(self, scaler: GradScaler | None) -> None:
        chosen, before = scaler_for(self._compute, scaler), self._scaling
        self._scaling = None if chosen is None else LossScaling(chosen)
        if self._scaling is not None and before is not None:
            self._scaling.skipped_steps = before.skipped_steps

    @property
    def _accumulated(self) -> int:
        """The micro-batches by whose number Lightning divides each loss; the user does in manual optimization."""
        return int(self._run.accumulate_grad_batches) if self._run is not None and self._is_automatic else 1

    @property
    def _is_automatic(self) -> bool:
        model = self._converted_model
        return not isinstance(model, LightningModule) or model.automatic_optimization

    def _follow_loss(self) -> None:
        """Amaxes of output gradients follow what the loss is multiplied by, of which this is the only account."""
        if self.histories:
            self.histories.follow_((1.0 if self._scaling is None else self._scaling.scale) / self._accumulated)

    def scale_gradients(self, factor: float) -> None:
        """Tells delayed scaling that ``training_step`` multiplies its loss by ``factor`` more than before.

        The amaxes of earlier output gradients are multiplied by it; without this, a larger loss saturates for some
        steps. ``accumulate_grad_batches`` and loss scalers are followed by themselves. Call it between steps.

        Raises:
            ValueError: the factor is not above 0.

        Examples:
            >>> trainer.precision_plugin.scale_gradients(8)  # the loss was divided by 8 until now
        """
        positive("factor", factor, "what the loss has grown by")
        if self.histories:
            self.histories.scale_gradients_(torch.tensor(float(factor), device="cpu"))

    @property
    def trained(self) -> Trained:
        names = self._present_names
        return Trained(
            {names[name]: casts for name, casts in self._casts.items()},
            self._compute.name,
            self.smooth_swiglu,
            (*self.shared_amax,),
            self.exact,
            self.backend,
            None if self.scaler is None else type(self.scaler).__name__,
            {names[name]: self._planned[name] for name in self._changed if name in names and name in self._planned},
            (*sorted(self._left),),
        )

    def attach(self, model: nn.Module, planned: Mapping[str, LinearCasts]) -> None:
        """Converts a model without a Trainer, for a plugin made by :meth:`from_checkpoint`; see :func:`restore`."""
        assert self._origin is not None
        self._expect(model)
        self._convert(model, planned, self.seed)
        self._load(self._origin.state)
        if self.histories is not None:
            self.histories.release()

    def move_to(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Empty: Lightning would save it under the class name. See :meth:`on_save_checkpoint`."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._say_what_has_changed()  # histories of layers that are gone are not saved
        state: dict[str, Any] = {name: getattr(self, name) for name in ("step", "micro_batch", "phase", "seed")}
        state["blend"] = self.blend.cpu().clone()
        if self.histories and self._has_averages:
            state["averaged"] = True
        if self._scaling is not None:
            state |= self._scaling.state_dict()
        if self._changed:
            state["casts"] = {name: primitive(casts) for name, casts in self._changed.items()}
        state |= self.histories.state_dict() if self.histories else {}
        checkpoint[CHECKPOINT_KEY] = state | {"trained": self.trained.record()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Loads the plugin's state; raises ``ValueError`` if it is damaged or does not fit the model."""
        self.overridden = overridden(self._asked, checkpoint, () if self._run is None else self._run.optimizers)
        warn_of(self.overridden)
        state = state_of(checkpoint)
        if state is None:
            self._runs.restored(self._converted_model)
            scale = f" The loss scale starts at {self.scaler.get_scale():g}." if self.scaler is not None else ""
            rank_zero_warn(
                "The checkpoint holds no state of lightning_lowbit (saved without the plugin, or weights only): its "
                f"weights are loaded, and quantization starts at step {self.step}, in phase {self.phase!r}. If it "
                f"was trained in another phase, call plugin.set_phase(...).{scale}"
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
        self._runs.restored(self._converted_model)
        self._load_casts(state)
        if state.get("trained") is None:
            rank_zero_warn(
                f"The checkpoint holds {LACKING}: they are taken to be those of this plugin, {self.casts}. If it was "
                "trained with others, give the plugin those. A checkpoint saved from now on tells them."
            )
        else:
            self._compare(Trained.read(state["trained"]), "The checkpoint")
        of_other_weights = state.get("averaged", False) and (self._is_evaluating or not self._has_averages)
        if not self.fresh_histories and not of_other_weights:
            # Older versions saved the parts that `_follow_loss` multiplies.
            scale = state.get("scaler", {}).get("scale", 1.0) / state.get("accumulated", self._accumulated)
            self._load_histories({"gradient_scale": {"loss": torch.tensor([float(scale)])}, **state})
        self.step, self.micro_batch = state["step"], state["micro_batch"]
        self.set_phase(state["phase"])
        self.set_blend(float(state.get("blend", 1.0)))

    def _load_casts(self, state: Mapping[str, Any]) -> None:
        self._changed = {name: LinearCasts.of(casts) for name, casts in state.get("casts", {}).items()}
        if self._keys is None:
            return
        if missing := ", ".join(name for name in self._changed if name not in self._planned):
            what = "The checkpoint holds casts of layers that this run does not convert"
            rank_zero_warn(f"{what}: {missing}; they stay in high precision.")
            self._changed = {name: casts for name, casts in self._changed.items() if name in self._planned}
        self._renew_casts({n: self._changed.get(n, planned) for n, planned in self._planned.items()}, keep=False)

    def _load_histories(self, state: Mapping[str, Any]) -> None:
        """Loads histories, after their casts."""
        if not self.histories:
            return
        if "amax_history" not in state:
            rank_zero_warn(
                "The checkpoint holds no amax histories (it was trained without delayed scaling and smoothing): they "
                "start empty, and the first step scales by its own amaxes."
            )
            return
        self.histories.load_state_dict(state)

    def _compare(self, trained: Trained, what: str) -> None:
        """Reports differences from the recorded training; in evaluation they are an error by default."""
        here = self.trained
        differences = trained.differences(here)
        if trained.scaler != here.scaler and not self._is_evaluating:
            differences.append(f"the loss: scaled by {trained.scaler} in the checkpoint, by {here.scaler} here")
        if not differences:
            return
        told = f"{what} was trained otherwise than this plugin computes:\n  " + "\n  ".join(differences)
        model = self._converted_model
        defaults = {} if model is None else Reasons(model).defaults
        if was := [name for name in defaults if trained.layers.get(name, LinearCasts()) != LinearCasts()]:
            told += f"\nBy default {some(was)} stay in high precision: name them in overrides or only to quantize them."
        if not self._is_evaluating:
            rank_zero_warn(f"{told}\nTraining continues as this plugin has it.")
        elif self.casts_of_checkpoint:
            raise ValueError(
                f"{told}\nTo evaluate what was trained, use plugins=[LowBitPrecision.from_checkpoint(path)]; to "
                "evaluate it with the casts of this plugin, give this plugin casts_of_checkpoint=False."
            )
        else:
            rank_zero_info(f"{told}\nIt is evaluated with the casts of this plugin, as casts_of_checkpoint=False says.")
