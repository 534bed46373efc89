"""What enters linear layers: sums of powers and channel amaxes, from forward pre-hooks that can be switched on and off.

torch.compile makes two graphs of a model, since the switch is a bool. Each layer has its own tensors instead of a row
of a shared one: nothing in the graph of a block then says which block it is, and blocks compiled one by one share it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils.rnn import pad_sequence

from lightning_lowbit.distributed import all_reduce_world_
from lightning_lowbit.metrics.outliers import SUMS, activation_sums
from lightning_lowbit.quant.statistics import wide_dtype


class _Input(NamedTuple):
    """What entered a layer since the last measurement: ``SUMS``, and amaxes ``[in_features]``."""

    sums: Tensor
    channel_amax: Tensor


class LayerInputs:
    """Hooks into some layers; they cost a Python call each while they are off.

    Args:
        layers: linear layers, by name.
        device: that computes.
        k: how many times the root mean square an outlier exceeds.
    """

    def __init__(self, layers: Mapping[str, nn.Module], device: torch.device, k: float) -> None:
        self.layers, self._switch = dict(layers), [False]
        self._inputs: list[_Input] = []
        self._handles: list[Any] = []
        for layer in self.layers.values():
            sums = torch.zeros(len(SUMS), dtype=wide_dtype(device), device=device)
            found = _Input(sums, torch.zeros(_in_features(layer), device=device, dtype=torch.float32))
            self._inputs.append(found)
            self._handles.append(layer.register_forward_pre_hook(_hook(self._switch, *found, k), with_kwargs=True))

    @property
    def is_on(self) -> bool:
        """Whether passes are seen."""
        return self._switch[0]

    @is_on.setter
    def is_on(self, on: bool) -> None:
        self._switch[0] = on

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """What entered since the last call, on all ranks together: two collectives.

        Returns:
            ``SUMS`` ``[layers, 6]``; the amax of each layer ``[layers]``, NaN if its input is not finite or there was
            none; and the number of its channel ``[layers]``.
        """
        sums = torch.stack([seen.sums for seen in self._inputs])
        amaxes = pad_sequence([seen.channel_amax for seen in self._inputs], batch_first=True)
        for seen in zip(*self._inputs, strict=True):
            torch._foreach_zero_(seen)
        all_reduce_world_(sums)
        all_reduce_world_(amaxes, dist.ReduceOp.MAX)
        amax, channel = amaxes.max(1)
        # A maximum over ranks may lose a NaN, a sum keeps it.
        return sums, torch.where(sums[:, SUMS.index("first")].isnan() | (sums[:, 0] == 0), torch.nan, amax), channel

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self.is_on, self._handles = False, []


def _hook(switch: list[bool], sums: Tensor, channel_amax: Tensor, k: float) -> Callable[..., None]:
    """A forward pre-hook that adds what enters a layer to its sums, while it is switched on."""

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if switch[0]:
            with torch.no_grad():
                x = (*args, *kwargs.values())[0].detach()
                x, start = _local(x) if isinstance(x, DTensor) else (x, 0)
                more, amax = activation_sums(x, k)
                sums.add_(more.to(sums.device))
                into = channel_amax[start : start + len(amax)]
                into.copy_(torch.maximum(into, amax.to(sums.device)))

    return note


def _local(x: DTensor) -> tuple[Tensor, int]:
    """This rank's shard of an activation, and the first of its channels."""
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return x.to_local(), offset[-1]


def _in_features(layer: Any) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.weight.shape[0]
