"""Stacks of linear layers, such as the experts of a mixture: rows of one matrix, sorted by the layer that takes them.

    y[rows of e] = x[rows of e] · W[e]ᵀ + b[e]        x [tokens, in], W [experts, out, in], b [experts, out]

Each expert is quantized as if it were a linear layer of its own: its rows have their own scales and random bits, from
keys of its own (:func:`lightning_lowbit.nn.core.calls.keys_of_product`). So its results do not depend on the rows of
other experts, and an expert without rows has gradients of zero. Where all GEMMs are those of codes on CPUs, each is one
call for all experts; elsewhere experts come one after the other. Both give the same bits. With ``grouped="native"``
each is one of :mod:`lightning_lowbit.nn.native.grouped`, of the same operands, with another rounding of results.

Where groups end must be known on the host, which waits for it once per layer. ``torch.compile`` breaks its graph at
these layers, which run eagerly.

With expert parallelism each process holds some of the experts whole, and draws the random bits of their global indices.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowbit.checks import integer
from lightning_lowbit.distributed import local, offsets_of
from lightning_lowbit.nn.casts.linear_casts import LinearCasts
from lightning_lowbit.nn.casts.traits import OPERANDS, OPERANDS_OF
from lightning_lowbit.nn.core.calls import keys_of_call
from lightning_lowbit.nn.core.function import How, QuantizedGemms
from lightning_lowbit.nn.core.gemm import no_autocast
from lightning_lowbit.nn.core.inputs import check_inputs
from lightning_lowbit.nn.core.operands import Pass
from lightning_lowbit.nn.core.watch import is_observed
from lightning_lowbit.nn.layers.composite import PartLayer
from lightning_lowbit.nn.layers.layer import QuantizedLayer
from lightning_lowbit.nn.native.grouped import grouped_obstacle, has_grouped_gemm
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.call import operand_dtype

# int32 [experts], or the same numbers on the host.
Offsets = Tensor | Sequence[int]


class GroupedLinear(nn.Module):
    """A stack of linear layers of one size: expert ``e`` computes ``x · W[e]ᵀ + b[e]`` for its rows of ``x``.

    It is plain torch, in high precision, until :func:`lightning_lowbit.convert` or a precision plugin quantizes it.

    Args:
        experts: number of layers in the stack.
        in_features: width of the input.
        out_features: width of the output.
        bias: whether each expert adds a bias.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        weight: ``[experts, out_features, in_features]``.
        bias: ``[experts, out_features]``, or None.

    Examples:
        >>> layer = GroupedLinear(4, in_features=16, out_features=32)
        >>> x = torch.randn(10, 16)  # 3 rows for the first expert, none for the second, 5 and 2
        >>> layer(x, torch.tensor([3, 3, 8, 10])).shape
        torch.Size([10, 32])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.experts = integer("experts", experts, 1)
        self.in_features, self.out_features = in_features, out_features
        weight = torch.empty(experts, out_features, in_features, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(weight.new_empty(experts, out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws each expert as ``nn.Linear`` does, uniformly within ``± 1 / sqrt(in_features)``."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, offsets: Offsets) -> Tensor:
        """Multiplies each expert's rows of ``x``, ``[tokens, in_features]``, sorted by expert, to ``[tokens,
        out_features]``.

        ``offsets`` are int32 ``[experts]``: where the rows of each expert end, as ``torch.nn.functional.grouped_mm``
        takes them, or a list of these numbers, for which nothing waits. Rows after the last one belong to no expert:
        they give zeros. Other offsets are a ``ValueError``.
        """
        return grouped_linear(x, self.weight, offsets, self.bias)

    def extra_repr(self) -> str:
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def grouped_linear(x: Tensor, weight: Tensor, offsets: Offsets, bias: Tensor | None = None) -> Tensor:
    """Does :meth:`GroupedLinear.forward` in high precision, of any parameters: a loop of ``F.linear``."""
    ends = ends_of(offsets, len(x), len(weight))
    *parts, rest = _split(x, ends)
    biases = () if bias is None else bias.unbind()
    results = [F.linear(*arguments) for arguments in _by_expert(parts, weight.unbind(), biases)]
    return torch.cat([*results, results[0].new_zeros(len(rest), weight.shape[1])])


def grouping_obstacle(casts: LinearCasts) -> str | None:
    """Returns why grouped GEMMs do not serve casts, and what to do, in words; None if they do."""
    for name in OPERANDS:
        cast = casts.cast_of(name)
        if cast is not None and operand_dtype(torch.bfloat16, cast) != torch.bfloat16:
            return (
                f"elements times scales of {name} are not exact in bfloat16, in which grouped GEMMs multiply: give the "
                "casts round_to_bfloat16 (every: {round_to_bfloat16: true} beside a preset), or other casts"
            )
    rotated = [
        name for gemm in casts.hadamard for name in OPERANDS_OF[gemm] if not isinstance(getattr(casts, name), Cast)
    ]
    for what, others in (
        ("rotated operands in high precision", rotated),
        ("delayed scaling", casts.traits.delayed),
        ("means that are subtracted", casts.subtract_mean),
        ("surrogate gradients", casts.surrogate),
        ("operands that are quantized again", casts.requantize),
    ):
        if others:
            return f"{what} are computed for one expert after the other ({', '.join(others)}): give other casts"
    return None


def _split(x: Tensor, ends: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Splits off the rows of each expert, and last those of none."""
    return torch.split(x, [end - start for start, end in zip((0, *ends), (*ends, len(x)), strict=True)])


def _by_expert(rows: Sequence[Any], weights: Sequence[Any], biases: Sequence[Any]) -> Iterable[tuple[Any, ...]]:
    return zip(rows, weights, biases or [None] * len(weights), strict=True)


def ends_of(offsets: Offsets, rows: int, experts: int) -> tuple[int, ...]:
    """Offsets on the host; a ``ValueError`` if they are not those of so many rows and experts."""
    ends = tuple(offsets.tolist() if isinstance(offsets, Tensor) else offsets)
    bounds = (0, *ends, rows)
    if len(ends) != experts or any(end < start for start, end in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(
            f"offsets are {experts} ascending numbers of at most {rows}: where the rows of each expert end. Got {ends}."
        )
    return ends


class _Parts(torch.autograd.Function):
    """The rows, the matrix and the bias of each expert, as views, and the gradients of the whole from theirs."""

    # Torch would join gradients under the autocast of the backward pass, which takes some dtypes alone.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ends: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.starts, ctx.x_shape, ctx.weight_shape = (0, *ends), x.shape, weight.shape
        ctx.bias_shape = None if bias is None else bias.shape
        *rows, _ = _split(x, ends)
        return (*rows, *weight.unbind(), *(() if bias is None else bias.unbind()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weights, biases = _thirds(gradients, len(ctx.starts) - 1)
        dx = _joined(rows, ctx.x_shape, [slice(*pair) for pair in pairwise(ctx.starts)])
        return dx, _joined(weights, ctx.weight_shape), _joined(biases, ctx.bias_shape), None


def _thirds(parts: tuple[Any, ...], experts: int) -> tuple[Any, Any, Any]:
    """Cuts the results of :class:`_Parts`, or their gradients, into those of rows, weights and biases."""
    return parts[:experts], parts[experts : 2 * experts], parts[2 * experts :]


def _joined(parts: Sequence[Tensor | None], shape: Any, places: Sequence[Any] | None = None) -> Tensor | None:
    """Joins gradients at their places of a whole, by default their indices; the rest is zero. None if all are None."""
    sample = next((part for part in parts if part is not None), None)
    if sample is None:
        return None
    whole = sample.new_zeros(shape)
    for place, part in zip(places or range(len(parts)), parts, strict=True):
        if part is not None:
            whole[place].copy_(part)
    return whole


def _together(x: Tensor, weight: Tensor, bias: Tensor | None, how: How, pass_: Pass) -> list[Tensor]:
    """Computes all experts of a pass, whose number is that of the first one, by one call for each GEMM."""
    assert pass_.ends is not None
    rows = x if len(x) == pass_.ends[-1] else x[: pass_.ends[-1]]
    return [QuantizedGemms.apply(rows, weight, bias, how, pass_)[0]]  # type: ignore[no-untyped-call]


def _one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None, how: How, pass_: Pass) -> list[Tensor]:
    """Computes the experts with rows one after the other."""
    ends, first = pass_.ends, pass_.number
    assert ends is not None and first is not None
    parts = _thirds(_Parts.apply(x, weight, bias, ends), len(weight))  # type: ignore[no-untyped-call]
    return [
        QuantizedGemms.apply(*arguments, how, pass_._replace(number=number, ends=None))[0]  # type: ignore[no-untyped-call]
        for number, arguments in enumerate(_by_expert(*parts), start=first)
        if len(arguments[0])
    ]


class GroupedLayer(QuantizedLayer):
    """Base class of converted stacks."""

    kind = "experts"
    first_expert: int = 0  # global index of the first expert of a weight that is a plain tensor

    def forward(self, x: Tensor, offsets: Offsets) -> Tensor:  # type: ignore[override]
        """Does :meth:`GroupedLinear.forward` through the casts. Of a DTensor that is cut along the experts, ``offsets``
        and the results are those of this process's experts. One that is cut otherwise is a ``ValueError``."""
        weight, bias, first = self.weight_matrix(), self.bias, self.first_expert
        if isinstance(weight, DTensor):
            first = self.first_of(weight)
            weight, bias = local(weight), None if bias is None else local(bias)
        if self.lowbit.casts.traits.is_empty or check_inputs(self, x):
            return grouped_linear(x, weight, offsets, bias)
        return self._quantized(x, weight, bias, offsets, first)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _quantized(self, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Offsets, first: int) -> Tensor:
        keys, ends = keys_of_call(self), ends_of(offsets, len(x), len(weight))
        if ends[-1] == 0:  # no expert has rows, and zeros have zeros as gradients
            return grouped_linear(x, weight, ends, bias)
        if x.shape[1] != weight.shape[2]:
            raise ValueError(f"Layer {self.name_in_model} takes {weight.shape[2]} features; got {tuple(x.shape)}.")
        dtype = self._dtype_of_pass(x, weight, torch.is_autocast_enabled(x.device.type), None)
        with no_autocast(x.device.type):
            pass_ = self._pass(dtype, keys, None)
            how = self._how(dtype, x.device, saves_codes=self._saves_codes(x, dtype, None, pass_))
            takes_watch = how.is_grouped and not is_observed()
            is_one_call = how.takes_stacks and (pass_.watch is None or takes_watch) and weight.numel() > 0
            multiply = _together if is_one_call else _one_by_one
            results = multiply(x, weight, bias, how, pass_._replace(number=first, ends=ends))
            if rest := len(x) - ends[-1]:
                results.append(results[0].new_zeros(rest, weight.shape[1]))
            y = results[0] if len(results) == 1 else torch.cat(results)
        self._expect_plugin(y, weight)
        return y

    def is_grouped(self, device: torch.device, dtype: torch.dtype | None = None) -> bool:
        """Also raises a ``ValueError`` where ``grouped="native"`` cannot be honored."""
        if self.lowbit.grouped == "auto" or self.lowbit.blend is not None:
            return False
        reason = grouping_obstacle(self.lowbit.casts) or grouped_obstacle(device, dtype)
        if reason is not None:
            raise ValueError(f"Layer {self.name_in_model}: grouped='native', but {reason}, or leave grouped out.")
        return has_grouped_gemm(device)

    def native_kinds(
        self, device: torch.device, casts: LinearCasts | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, str]:
        return {} if self.is_grouped(device, dtype) else super().native_kinds(device, casts, dtype)

    def _emulated_because(self, gemm: str, device: torch.device, dtype: torch.dtype | None) -> str | None:
        if self.is_grouped(device, dtype):
            return "one grouped GEMM in bfloat16 for all experts (grouped='native')"
        return super()._emulated_because(gemm, device, dtype)

    def first_of(self, weight: DTensor) -> int:
        """Returns the global index of the first expert that this process holds."""
        if any(not placement.is_replicate() and not placement.is_shard(0) for placement in weight.placements):
            raise ValueError(
                f"The weight of {self} is spread over processes as {weight.placements}, and experts are quantized "
                "whole. Spread them by expert (Shard(0); ep_size in DistributedConfig of transformers), gather it by "
                "FSDP2 (fully_shard), or leave the stacks out by skip."
            )
        return offsets_of(weight)[0]


class QuantGroupedLinear(GroupedLayer, GroupedLinear):
    """A converted :class:`GroupedLinear`."""


class GroupedProduct(GroupedLayer, PartLayer):
    """A stack whose weights, and biases, are parameters of a composite layer.

    Args:
        owner: the module that calls the part.
        weight: name of the owner's parameter ``[experts, out_features, in_features]``.
        bias: name of the owner's parameter ``[experts, out_features]``; None for none.
        is_transposed: whether the weight is stored as ``[experts, in_features, out_features]``.
    """

    def __init__(self, owner: Any, weight: str, bias: str | None = None, is_transposed: bool = False) -> None:
        super().__init__(owner, weight, bias)
        self.is_transposed = is_transposed

    def matrix_of(self, weight: Tensor) -> Tensor:
        return weight.mT if self.is_transposed else weight

    def extra_repr(self) -> str:
        inherited = super().extra_repr()
        if self.weight.dim() != 3:  # flattened by FSDP1
            return inherited
        experts, out, inner = self.weight_matrix().shape
        return f"{experts=}, in_features={inner}, out_features={out}, {inherited}"
