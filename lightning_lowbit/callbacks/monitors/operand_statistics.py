"""What casts do to the operands of layers, from the rows of sums that layers leave: in numbers, means and pictures.

    sqnr          10 log10(Σ x² / Σ (x - q)²)                                    dB
    underflow     of the elements that are not 0, the share that became 0
    saturation    share of the elements beyond the largest magnitude that their scale can express
    scales        the least and the largest, of blocks that hold anything but zeros

There are none of an operand that was not quantized.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbit.distributed import all_reduce_world_
from lightning_lowbit.metrics import is_ternary
from lightning_lowbit.nn import OPERANDS, QuantizedLayer
from lightning_lowbit.nn.watch import Watch
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.statistics import MAXIMA, SUMS
from lightning_lowbit.report.html import Block, HeatMap, Table

# By layer and operand, the numbers by name.
OperandNumbers = dict[str, dict[str, dict[str, float]]]

_SIZE = len(SUMS) + len(MAXIMA)

# Where the colors of SQNR begin and end: at 5 dB a third of a tensor's energy is noise, as in ternary weights; NVFP4
# has about 20 dB, and FP8 with scales per tensor about 30, beyond which training has not been seen to suffer.
_POOR, _GOOD = 5.0, 30.0


class QuantizedOperands(Watch):
    """The operands of some layers.

    Args:
        layers: converted layers, by name.
    """

    def __init__(self, layers: Mapping[str, QuantizedLayer]) -> None:
        super().__init__(layers, "operand_sums")

    def sums_over_ranks(self) -> Tensor:
        """``[layers, 6, 8]``, of all ranks together, each operand as often as it was used: two collectives."""
        added, largest = self.sums[..., : len(SUMS)].contiguous(), self.sums[..., len(SUMS) :].contiguous()
        if len(self.sums):
            all_reduce_world_(added)
            all_reduce_world_(largest, dist.ReduceOp.MAX)
        return torch.cat([added, largest], -1)

    def is_ternary(self, layer: str, operand: str) -> bool:
        """Whether an operand has the levels -1, 0 and 1."""
        cast = getattr(self.layers[layer].full_casts, operand)
        return isinstance(cast, Cast) and is_ternary(cast)

    def means(self, sums: Tensor) -> dict[str, Tensor]:
        """Of SQNR, underflow and saturation over the layers that quantize an operand, on the device.

        The mean of SQNR leaves out layers where it is infinite, such as one whose weight is all zeros, unless it is
        everywhere. NaN where no layer came to use the operand.
        """
        elements, signal, noise, nonzero, underflowed, saturated = sums[..., : len(SUMS)].unbind(-1)
        sqnr = torch.where(noise == 0, math.inf, 10 * torch.log10(signal / noise))
        underflow, saturation = underflowed / nonzero.clamp(min=1), saturated / elements.clamp(min=1)
        seen = elements > 0
        is_noisy = seen & ~sqnr.isinf()
        mean_sqnr = torch.where(is_noisy, sqnr, 0).sum(0) / is_noisy.sum(0)
        means = {
            "sqnr": torch.where(is_noisy.any(0), mean_sqnr, torch.where(seen.any(0), math.inf, math.nan)),
            "underflow": torch.where(seen, underflow, 0).sum(0) / seen.sum(0),
            "saturation": torch.where(seen, saturation, 0).sum(0) / seen.sum(0),
        }
        used = {
            operand: index
            for index, operand in enumerate(OPERANDS)
            if any(isinstance(getattr(layer.casts, operand), Cast) for layer in self.layers.values())
        }
        return {f"{name}/{operand}": mean[index] for operand, index in used.items() for name, mean in means.items()}

    def numbers(self, sums: Sequence[float]) -> OperandNumbers:
        """What sums that were read tell of each operand that was quantized."""
        rows = iter([sums[start : start + _SIZE] for start in range(0, len(sums), _SIZE)])
        found = {layer: {operand: _numbers(next(rows)) for operand in OPERANDS} for layer in self.layers}
        return {layer: {operand: of_one for operand, of_one in row.items() if of_one} for layer, row in found.items()}

    @staticmethod
    def blocks(found: OperandNumbers, at: str) -> list[Block]:
        """A heat map of SQNR by layer and operand, and a table of the rest; nothing where nothing was found."""
        layers = [layer for layer, row in found.items() if row]
        used = [operand for operand in OPERANDS if any(operand in row for row in found.values())]
        if not used:
            return []
        rows = []
        for operand in used:
            of_layers = [row[operand] for row in found.values() if operand in row]
            shares = [max(of_one[name] for of_one in of_layers) for name in ("underflow", "saturation")]
            ends = min(one["scale_min"] for one in of_layers), max(one["scale_max"] for one in of_layers)
            rows.append([operand, *(f"{share:.2%}" for share in shares), *(f"{end:.3g}" for end in ends)])
        header = ["operand", "largest underflow", "largest saturation", "least scale", "largest scale"]
        return [
            HeatMap(
                rows=layers,
                columns=used,
                values=[[found[layer].get(operand, {}).get("sqnr") for operand in used] for layer in layers],
                unit="dB",
                low=_POOR,
                high=_GOOD,
                caption=f"{at}, or where an operand was quantized last: signal to quantization noise ratio.",
            ),
            Table(header, rows, "Over all layers, at the same steps."),
        ]


def _numbers(sums: Sequence[float]) -> dict[str, float]:
    """By name; none where nothing was quantized. Scales are 0 where all blocks held nothing but zeros."""
    elements, signal, noise, nonzero, underflowed, saturated, inverse_scale, scale = sums
    if not elements:
        return {}
    sqnr = math.inf if noise == 0 else math.nan if math.isnan(noise) else -math.inf
    return {
        "sqnr": 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else sqnr,
        "underflow": underflowed / nonzero if nonzero else 0.0,
        "saturation": saturated / elements,
        "scale_min": 1 / inverse_scale if inverse_scale else 0.0,
        "scale_max": scale,
    }
