"""Statistics of the inputs of linear layers and convolutions, from forward pre-hooks that can be switched on and off.

Each layer has its own tensors: then the graphs of all blocks are alike, and blocks compiled one by one share a graph.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from lightning_lowbit._torch import ConvNd, foreach_zero_
from lightning_lowbit._torch.devices import wide_dtype
from lightning_lowbit._torch.sharding import offset_of_shard
from lightning_lowbit.distributed import all_reduce_world_, whole_shape
from lightning_lowbit.metrics.outliers import SUMS, activation_sums
from lightning_lowbit.nn import QuantizedLayer


class _Input(NamedTuple):
    """Statistics of a layer's input since the last measurement: ``SUMS``, and amaxes ``[in_features]``."""

    sums: Tensor
    channel_amax: Tensor


class LayerInputs:
    """Forward pre-hooks of linear layers and convolutions, by name; outliers exceed ``k`` times the root mean square.

    The hooks measure while the only element of ``switch`` is True.
    """

    def __init__(self, layers: Mapping[str, nn.Module], device: torch.device, k: float) -> None:
        self.layers, self.switch = dict(layers), [False]
        self._inputs: list[_Input] = []
        self._handles: list[Any] = []
        for layer in self.layers.values():
            sums = torch.zeros(len(SUMS), dtype=wide_dtype(device), device=device)
            statistics = _Input(sums, torch.zeros(in_features(layer), device=device, dtype=torch.float32))
            self._inputs.append(statistics)
            hook = _hook(self.switch, *statistics, k)
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the statistics since the last call, over all ranks, by two collectives.

        Returns ``SUMS`` ``[layers, 6]``; the amax of each layer ``[layers]``, NaN for an input that is missing or not
        finite; and the channel of the amax ``[layers]``.
        """
        sums = torch.stack([seen.sums for seen in self._inputs])
        amaxes = pad_sequence([seen.channel_amax for seen in self._inputs], batch_first=True)
        for seen in zip(*self._inputs, strict=True):
            foreach_zero_(seen)
        all_reduce_world_(sums)
        all_reduce_world_(amaxes, dist.ReduceOp.MAX)
        amax, channel = amaxes.max(1)
        # A maximum over ranks may lose a NaN, a sum keeps it.
        return sums, torch.where(sums[:, SUMS.index("first")].isnan() | (sums[:, 0] == 0), torch.nan, amax), channel

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.switch[0], self._handles = False, []


def _hook(switch: list[bool], sums: Tensor, channel_amax: Tensor, k: float) -> Callable[..., None]:

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(iter((*args, *kwargs.values())), None)
        if switch[0] and isinstance(x, Tensor) and x.is_floating_point() and not x.is_nested:
            with torch.no_grad():
                x, axis = x.detach(), _feature_axis(layer, x)
                x, start = (x.to_local(), offset_of_shard(x)[axis]) if isinstance(x, DTensor) else (x, 0)
                more, amax = activation_sums(x.movedim(axis, -1), k)
                sums.add_(more.to(sums.device))
                into = channel_amax[start : start + len(amax)]
                into.copy_(torch.maximum(into, amax.to(sums.device)))

    return note


def _feature_axis(layer: nn.Module, x: Tensor) -> int:
    return x.dim() - 1 - (len(layer.kernel_size) if isinstance(layer, ConvNd) else 0)


def in_features(layer: Any) -> int:
    """Returns the number of features of a layer's input; of a convolution, its channels."""
    if isinstance(layer, ConvNd):
        return layer.in_channels
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return layer.matrix_shape[-1] if isinstance(layer, QuantizedLayer) else whole_shape(layer.weight)[0]
