"""The output layers that stay in high precision."""

from collections.abc import Mapping

from torch import nn

from lightning_lowbit._lightning import rank_zero_info, say_once
from lightning_lowbit.checks import some
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.conversion.convert import Selection
from lightning_lowbit.nn.conversion.defaults import mark_outputs
from lightning_lowbit.nn.layers.layer import clean_name
from lightning_lowbit.precision.checkpoints.trained import Trained


class OutputLayers:
    """The output layers of a run that are left in high precision, by default or as in its checkpoint.

    Attributes:
        left: names of the output layers that the converted model leaves in high precision.
    """

    def __init__(self) -> None:
        self.left = frozenset[str]()
        self.restart()

    def restart(self) -> None:
        """Forgets the checkpoint."""
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
