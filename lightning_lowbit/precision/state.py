"""The plugin's state in a checkpoint: tensors and primitives under one key, the same on all ranks."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lightning_lowbit._lightning import TrainerFn, rank_zero_info, rank_zero_warn
from lightning_lowbit.checks import some
from lightning_lowbit.nn.casts import LinearCasts
from lightning_lowbit.nn.conversion.reasons import Reasons
from lightning_lowbit.precision.checkpoints.files import CHECKPOINT_KEY, state_of
from lightning_lowbit.precision.checkpoints.overridden import asked_options, overridden, warn_of
from lightning_lowbit.precision.checkpoints.trained import LACKING, Origin, Trained, primitive
from lightning_lowbit.precision.layers import ConvertedLayers
from lightning_lowbit.precision.loss_scaling import LossScaling
from lightning_lowbit.precision.run_settings import ComputeDtype


class SavedLayers(ConvertedLayers):
    """The part of :class:`LowBitPrecision` that checkpoints save: converted layers, counters and the loss scale."""

    # Set by the plugin.
    casts: Any
    seed: int
    scaler: GradScaler | None
    fresh_histories: bool
    casts_of_checkpoint: bool
    _compute: ComputeDtype
    _scaling: LossScaling | None

    def __init__(self) -> None:
        super().__init__()
        self.step = 0  # optimizer steps taken
        self.micro_batch = 0  # training steps since then
        self._asked = asked_options([], [])
        self.overridden: list[str] = []  # options of this run that the checkpoint overrides
        self._origin: Origin | None = None
        self._trainer: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_trainer": None}

    @property
    def _run(self) -> Any:
        return None if self._trainer is None else self._trainer()

    @property
    def _is_evaluating(self) -> bool:
        return self._run is not None and self._run.state.fn not in (None, TrainerFn.FITTING)

    @property
    def _accumulated(self) -> int:
        return 1 if self._run is None else int(self._run.accumulate_grad_batches)

    @property
    def trained(self) -> Trained:
        return Trained(
            self._casts,
            self._compute.name,
            self.smooth_swiglu,
            (*self.shared_amax,),
            self.exact,
            self.backend,
            None if self.scaler is None else type(self.scaler).__name__,
            {name: self._planned[name] for name in self._changed if name in self._planned},
        )

    def attach(self, model: nn.Module, planned: Mapping[str, LinearCasts]) -> None:
        """Converts a model without a Trainer, for a plugin made by :meth:`from_checkpoint`; see :func:`restore`."""
        assert self._origin is not None
        self._expect(model)
        self._convert(model, planned, self.seed)
        self._load(self._origin.state)

    def move_to(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Empty: Lightning would save it under the class name. See :meth:`on_save_checkpoint`."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state: dict[str, Any] = {name: getattr(self, name) for name in ("step", "micro_batch", "phase", "seed")}
        state["blend"] = self.blend.cpu().clone()
        if self.histories:  # gradients, so their amaxes too, are divided by this
            state["accumulated"] = self._accumulated
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
        self._load_casts(state)
        if state.get("trained") is None:
            rank_zero_warn(
                f"The checkpoint holds {LACKING}: they are taken to be those of this plugin, {self.casts}. If it was "
                "trained with others, give the plugin those. A checkpoint saved from now on tells them."
            )
        else:
            self._compare(Trained.read(state["trained"]), "The checkpoint")
        if not self.fresh_histories:
            # Amaxes of output gradients depend on the loss scale, 1 if there is none, and on the number of
            # micro-batches, by which Lightning divides the loss. Both may differ from the saved run.
            before = state.get("scaler", {}).get("scale", 1.0) / state.get("accumulated", self._accumulated)
            after = (1.0 if self.scaler is None else self.scaler.get_scale()) / self._accumulated
            self._load_histories(state, after / before if before > 0 else 1.0)
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

    def _load_histories(self, state: Mapping[str, Any], growth: float) -> None:
        """Loads histories after their casts; ``growth`` is this run's loss scale over that of the saved run."""
        if not self.histories:
            return
        if "amax_history" not in state:
            rank_zero_warn(
                "The checkpoint holds no amax histories (it was trained without delayed scaling and smoothing): they "
                "start empty, and the first step scales by its own amaxes."
            )
            return
        self.histories.load_state_dict(state)
        self.histories.scale_gradients_(torch.tensor(growth, device="cpu"))

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
