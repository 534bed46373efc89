"""What a run takes from the checkpoint that it loads, where its plugin's arguments leave it open.

    compute_dtype="auto"    the dtype in which the checkpoint was trained, bf16 or float32
    quantize_output=None    output layers stay as they were there, quantized or left out

Explicit arguments are kept, and the differences are reported.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_lowbit._lightning import rank_zero_info, say_once
from lightning_lowbit.checks import flag, some
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import Selection, plan_by_name
from lightning_lowbit.nn.conversion.defaults import mark_outputs
from lightning_lowbit.nn.conversion.shared_amax import check_groups
from lightning_lowbit.nn.layers.layer import clean_name
from lightning_lowbit.precision.checkpoints.trained import Trained
from lightning_lowbit.precision.run_settings import ComputeDtype
from lightning_lowbit.precision.state import SavedLayers


class PlannedLayers(SavedLayers):
    """The part of :class:`LowBitPrecision` that plans the casts, with the settings that a checkpoint may decide."""

    leaves_output: ClassVar[bool] = False  # what quantize_output=None is: True leaves the output layer out

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
        self._outputs: frozenset[str] = frozenset()  # output layers that the checkpoint of this run has quantized
        self._left_before: frozenset[str] = frozenset()  # those that it has left out

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

    def _plan(self, model: nn.Module) -> tuple[dict[str, LinearCasts], frozenset[str]]:
        """The casts of each layer by name, and the output layers that are left out, by clean names."""
        left = frozenset[str]()
        if self._origin is not None:
            planned = plan_by_name(model, self._origin.trained.planned)
        else:
            selection = Selection(model, self.casts, self.skip, self.only, self.overrides, self.attention)
            planned = selection.planned(selection.excluded, self.smooth_swiglu)
            if self.leaves_output if self.quantize_output is None else not self.quantize_output:
                outputs = planned.keys() & selection.excluded_with_outputs
                left = frozenset(map(clean_name, outputs)) - self._outputs
                left |= self._left_before & {clean_name(name) for name in planned}
                planned = {name: casts for name, casts in planned.items() if clean_name(name) not in left}
        if self.shared_amax:
            check_groups(planned, self.shared_amax)
        return planned, left

    def _note_outputs(self, left: frozenset[str], model: nn.Module) -> None:
        """Keeps, marks and says which output layers are left out."""
        self._left = left
        mark_outputs(model, left)
        if left:
            layers, it = ("layers", "them") if len(left) > 1 else ("layer", "it")
            say_once(
                f"{type(self).__name__} leaves the output {layers} {some(sorted(left))} in high precision "
                f"(quantize_output=True quantizes {it})."
            )

    def _convert_as_planned(self, module: nn.Module) -> None:
        raise NotImplementedError

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._compute.restart()
        self._outputs = self._left_before = frozenset()

    @property
    def _followed(self) -> bool:
        return bool(self._outputs or self._left_before or self._compute.is_followed)

    def _decide_dtype(self, strategy: Any) -> None:
        self._compute.decide(strategy)
        self.precision = self._compute.precision

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes from the checkpoint what the arguments leave open, and loads the plugin's state.

        Raises:
            ValueError: the state is damaged or does not fit the model.
        """
        trained, model = Trained.of(checkpoint), self._converted_model
        if trained is not None and model is not None and self._follow(trained, self._left):
            root, self.histories = self._root, None
            self._release(in_use=True)
            self._convert_as_planned(model)
            self._root = root
        super().on_load_checkpoint(checkpoint)

    def _follow(self, trained: Trained, left: frozenset[str]) -> bool:
        """Takes from a checkpoint's record what the arguments leave open. Returns whether that changes anything.

        ``left`` are the output layers that would be left out.
        """
        has_dtype = isinstance(self._root, FullyShardedDataParallel)  # FSDP1 has been given one
        is_other_dtype = not has_dtype and self._compute.follow(trained.compute_dtype, self._device)
        self.precision = self._compute.precision
        before, quantized = self._outputs, {name for name, casts in trained.planned.items() if casts != LinearCasts()}
        left_before = self._left_before
        if self.quantize_output is None:
            self._outputs, self._left_before = (left | before) & quantized, frozenset(trained.outputs)
        if new := self._outputs - before:
            rank_zero_info(
                f"The checkpoint was trained with {some(sorted(new))} quantized: it stays so, although "
                f"{type(self).__name__} by default leaves it in high precision (as quantize_output=False does)."
            )
        return is_other_dtype or self._outputs != before or not self._left_before <= left | left_before
