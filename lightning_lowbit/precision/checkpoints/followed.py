"""What a run takes from the checkpoint that it loads, where its plugin's arguments leave it open.

    compute_dtype="auto"    the dtype in which the checkpoint was trained, bf16 or float32
    quantize_output=None    output layers that it has quantized stay so

Explicit arguments are kept, and the differences are reported.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_lowbit._lightning import rank_zero_info, say_once
from lightning_lowbit.checks import flag, some
from lightning_lowbit.nn.casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import plan, plan_by_name
from lightning_lowbit.nn.conversion.shared_amax import check_groups
from lightning_lowbit.nn.keys import clean_name
from lightning_lowbit.precision.checkpoints.trained import Trained
from lightning_lowbit.precision.run_settings import ComputeDtype
from lightning_lowbit.precision.state import SavedLayers


class Followed(SavedLayers):
    """The part of :class:`LowBitPrecision` that plans the casts, with the settings that a checkpoint may decide."""

    quantizes_output: ClassVar[bool] = True  # by default

    # Set by the plugin.
    casts: LinearCasts
    overrides: Mapping[str, LinearCasts]
    skip: Iterable[str]
    only: Iterable[str] | None
    attention: LinearCasts | None
    precision: Any
    _root: nn.Module | None

    def __init__(self, compute_dtype: str | int | torch.dtype, quantize_output: bool | None) -> None:
        super().__init__()
        self._compute = ComputeDtype(compute_dtype)
        self.quantize_output = None if quantize_output is None else flag("quantize_output", quantize_output)
        self._outputs: frozenset[str] = frozenset()  # that the checkpoint of this run has quantized

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of everything that is not quantized. For ``"auto"`` it is bf16 until a run decides."""
        return self._compute.dtype

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        return None if self.compute_dtype == torch.float32 else self.compute_dtype

    def plan(self, model: nn.Module) -> dict[str, LinearCasts]:
        """Returns the casts of each layer by name, without changing the model. Raises the same errors as conversion."""
        return self._plan(model)[0]

    def _plan(self, model: nn.Module) -> tuple[dict[str, LinearCasts], set[str]]:
        """The casts of each layer by name, and the output layers that are left out, by clean names."""
        left = set[str]()
        if self._origin is not None:
            planned = plan_by_name(model, self._origin.trained.planned)
        else:
            settings = self.skip, self.only, self.overrides, self.smooth_swiglu, self.attention
            planned = plan(model, self.casts, *settings)
            if not (self.quantizes_output if self.quantize_output is None else self.quantize_output):
                without = plan(model, self.casts, *settings, quantize_output=False)
                left = {clean_name(name) for name in planned if name not in without} - self._outputs
                planned = {name: casts for name, casts in planned.items() if clean_name(name) not in left}
        if self.shared_amax:
            check_groups(planned, self.shared_amax)
        return planned, left

    def _say_outputs(self, left: Iterable[str]) -> None:
        if names := sorted(left):
            layers = f"the output layer{'s' * (len(names) > 1)} {some(names)}"
            it = "them" if len(names) > 1 else "it"
            kind = type(self).__name__
            say_once(f"{kind} leaves {layers} in high precision (quantize_output=True quantizes {it}).")

    def _convert_as_planned(self, module: nn.Module) -> None:
        raise NotImplementedError

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._compute.restart()
        self._outputs = frozenset()

    def _decide_dtype(self, strategy: Any) -> None:
        self._compute.decide(strategy)
        self.precision = self._compute.precision

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes from the checkpoint what the arguments leave open, and loads the plugin's state.

        Raises:
            ValueError: the state is damaged or does not fit the model.
        """
        trained, model = Trained.of(checkpoint), self._converted_model
        if trained is not None and model is not None and self._follow(trained, model):
            root, self.histories = self._root, None
            self._release()
            self._convert_as_planned(model)
            self._root = root
        super().on_load_checkpoint(checkpoint)

    def _follow(self, trained: Trained, model: nn.Module) -> bool:
        """Takes from a checkpoint's record what the arguments leave open. Returns whether that changes anything."""
        has_dtype = isinstance(self._root, FullyShardedDataParallel)  # FSDP1 has been given one
        changed = not has_dtype and self._compute.follow(trained.compute_dtype, self._device)
        self.precision = self._compute.precision
        if self._origin is None and self.quantize_output is None:
            quantized = {name for name, casts in trained.planned.items() if casts != LinearCasts()}
            if outputs := self._plan(model)[1] & quantized:
                self._outputs |= outputs
                changed = True
                rank_zero_info(
                    f"The checkpoint was trained with {some(sorted(outputs))} quantized: it stays so, although "
                    f"{type(self).__name__} by default leaves it in high precision (as quantize_output=False does)."
                )
        return changed
