"""What casts do to the operands of layers: numbers by layer and operand, their means and charts.

sqnr                   10 log10(Σ x² / Σ (x - q)²), in dB
underflow              share of the nonzero elements that became 0
saturation             share of the elements beyond the largest magnitude that their scale can express
scale_min, scale_max   the range of the scales, without blocks of zeros; 0 if all blocks are
scale_mean, scale_std  mean and standard deviation of the scales of blocks that are not zero; optional
below_N, block_N       shares of these blocks: with scales 2^-N to 2^-(N+1) of the largest, and with an SQNR of 3 N to
                       3 (N + 1) dB; optional, N from 0 to 15
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbit.distributed import all_reduce_world_
from lightning_lowbit.metrics import is_ternary
from lightning_lowbit.metrics.casts import ratio
from lightning_lowbit.nn import OPERANDS, QuantizedLayer
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.statistics import BINS, MAXIMA, SUMS, sqnr_db
from lightning_lowbit.report.html import Block, HeatMap, Table

# Numbers by layer, operand and name.
OperandNumbers = dict[str, dict[str, dict[str, float]]]

NAMES = ("sqnr", "underflow", "saturation", "scale_min", "scale_max")

BLOCK_NAMES = ("scale_mean", "scale_std", *(f"{kind}_{i}" for kind in ("below", "block") for i in range(BINS)))

# Ends of the color scale of SQNR: at 5 dB a third of a tensor's energy is noise, as in ternary weights. NVFP4 has
# about 20 dB, and FP8 with scales per tensor about 30, above which training has not been seen to suffer.
_POOR, _GOOD = 5.0, 30.0


class QuantizedOperands(Watch):
    """The operands of converted layers, by the layers' names."""

    def __init__(self, layers: Mapping[str, QuantizedLayer], of_blocks: bool = False) -> None:
        super().__init__(layers, "operand_sums", of_blocks)
        self._names = NAMES + (BLOCK_NAMES if of_blocks else ())

    def measure(self) -> dict[str, Tensor]:
        """Numbers over all ranks by name, and ``elements`` (0: no numbers), each ``[layers, 6]``: two collectives."""
        added, maxima, blocks = self.sums.tensor_split([len(SUMS), len(SUMS) + len(MAXIMA)], -1)
        added, maxima = torch.cat([added, blocks], -1), maxima.contiguous()
        if len(self.sums):
            all_reduce_world_(added)
            all_reduce_world_(maxima, dist.ReduceOp.MAX)
        added, blocks = added.tensor_split([len(SUMS)], -1)
        sums = dict(zip((*SUMS, *MAXIMA), torch.cat([added, maxima], -1).unbind(-1), strict=True))
        scales = ratio(sums["inverse_scale"].sign(), sums["inverse_scale"]), sums["scale"]
        shares = sums["underflowed"] / sums["nonzero"].clamp(min=1), sums["saturated"] / sums["elements"].clamp(min=1)
        values = (sqnr_db(sums["signal"], sums["noise"]), *shares, *scales)
        found = {"elements": sums["elements"], **dict(zip(NAMES, values, strict=True))}
        if blocks.shape[-1]:
            each = (blocks / blocks[..., :1].clamp(min=1)).unbind(-1)  # means over blocks, and shares of them
            deviation = (each[2] - each[1].square()).clamp(min=0).sqrt()
            found |= dict(zip(BLOCK_NAMES, (each[1], deviation, *each[3:]), strict=True))
        return found

    def means(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Means over the layers that quantize an operand; NaN if none does; infinite SQNRs count only if all are."""
        seen = found["elements"] > 0
        is_noisy = seen & ~found["sqnr"].isinf()
        means = {
            name: torch.where(counted, found[name], 0).sum(0) / counted.sum(0)
            for name, counted in (("sqnr", is_noisy), ("underflow", seen), ("saturation", seen))
        }
        means["sqnr"] = torch.where(is_noisy.any(0) | ~seen.any(0), means["sqnr"], torch.inf)
        used = {
            operand: index
            for index, operand in enumerate(OPERANDS)
            if any(isinstance(getattr(layer.casts, operand), Cast) for layer in self.layers.values())
        }
        return {f"{name}/{operand}": mean[index] for operand, index in used.items() for name, mean in means.items()}

    def numbers(self, columns: Mapping[str, Any]) -> OperandNumbers:
        found: OperandNumbers = {layer: {} for layer in self.layers}
        for row, layer in enumerate(found):
            for place, operand in enumerate(OPERANDS):
                if columns["elements"][row][place]:
                    found[layer][operand] = {name: columns[name][row][place] for name in self._names}
        return found

    def is_ternary(self, layer: str, operand: str) -> bool:
        cast = getattr(self.layers[layer].full_casts, operand)
        return isinstance(cast, Cast) and is_ternary(cast)


def operand_blocks(found: OperandNumbers, at: str) -> list[Block]:
    """A heat map of SQNR by layer and operand, and a table of the other numbers; empty without numbers."""
    used = [operand for operand in OPERANDS if any(operand in row for row in found.values())]
    if not used:
        return []
    layers = [layer for layer, row in found.items() if row]
    rows = []
    for operand in used:
        of_layers = [row[operand] for row in found.values() if operand in row]
        shares = [max(of_one[name] for of_one in of_layers) for name in ("underflow", "saturation")]
        ends = min(one["scale_min"] for one in of_layers), max(one["scale_max"] for one in of_layers)
        rows.append([operand, *(f"{share:.2%}" for share in shares), *(f"{end:.3g}" for end in ends)])
    header = ["operand", "largest underflow", "largest saturation", "least scale", "largest scale"]
    sqnr = [[found[layer].get(operand, {}).get("sqnr") for operand in used] for layer in layers]
    caption = f"{at}, or where an operand was quantized last: signal to quantization noise ratio."
    return [
        HeatMap(rows=layers, columns=used, values=sqnr, unit="dB", low=_POOR, high=_GOOD, caption=caption),
        Table(header, rows, "Over all layers, at the same steps."),
        *_histograms(found, used),
    ]


def _histograms(found: OperandNumbers, used: list[str]) -> list[Block]:
    """Tables of the histograms of blocks, means over the layers that have them."""
    tables: list[Block] = []
    for kind, columns, caption in (
        ("below", [f"2^-{i}" for i in range(BINS)], "Shares of blocks by their scale, as a part of the largest one."),
        (
            "block",
            [f"{3 * i} dB" for i in range(BINS)],
            "Shares of blocks by their signal to quantization noise ratio.",
        ),
    ):
        rows = []
        for operand in used:
            of_layers = [row[operand] for row in found.values() if f"{kind}_0" in row.get(operand, {})]
            if of_layers:
                shares = [sum(one[f"{kind}_{i}"] for one in of_layers) / len(of_layers) for i in range(BINS)]
                rows.append([operand, *(f"{share:.1%}" if share else "" for share in shares)])
        tables += [Table(["operand", *columns], rows, caption)] if rows else []
    return tables
