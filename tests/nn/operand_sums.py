"""The operands of a run as layers quantized them, and their slow sums."""

from collections import defaultdict
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_lowbit import Cast, quantize
from lightning_lowbit.metrics import cast_statistics
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.nn.casts.traits import SHARED
from lightning_lowbit.nn.core.watch import observed
from tests.quant.tensors import spread_scales


class Made(NamedTuple):
    """What :func:`lightning_lowbit.quant.quantize_operand` took."""

    x: Tensor
    cast: Cast
    dim: int
    key: Tensor | None
    amax: Tensor | None

    def statistics(self):
        return cast_statistics(self.x.float(), self.cast, self.dim, self.key, self.amax)

    def scales(self):
        """Of the blocks that hold something."""
        quantized = quantize(self.x.float(), self.cast, self.dim, self.key, self.amax)
        scales = spread_scales(quantized) * (1.0 if quantized.tensor_scale is None else quantized.tensor_scale)
        return scales[(self.x != 0) & (scales > 0)]


@contextmanager
def captured():
    """All that watched layers quantize within this context, in the order in which their forward passes begin."""
    made, seen = defaultdict(list), {}

    def note(how, source, operand, key, amax, rows):
        layer = -1 if rows is None else seen.setdefault(rows.data_ptr(), len(seen))
        if rows is not None and source.is_operand:  # what another GEMM made
            made[layer, how.name] = made[layer, SHARED[how.name]]
        elif rows is not None and how.cast is not None:
            taken = (source.values, how.cast, how.dim, key, amax)
            made[layer, how.name].append(Made(*(a.clone() if isinstance(a, Tensor) else a for a in taken)))
        return operand

    with observed(note):
        yield made


def numbers_of(made):
    """What is said of an operand that was made so often."""
    first, *others = (one.statistics() for one in made)
    whole = sum(others, first)
    scales = torch.cat([one.scales() for one in made])
    ends = {"scale_min": float(scales.min()), "scale_max": float(scales.max())}
    return {name: float(getattr(whole, name)) for name in ("sqnr", "underflow", "saturation")} | ends


def assert_numbers(found, expected, message):
    """Sums of float32 squares are good for some 1e-6 of a share, so for 1e-5 dB; scales are rounded once more."""
    assert found.keys() == expected.keys(), message
    for name, value in expected.items():
        near = pytest.approx(value, abs=1e-4) if name == "sqnr" else pytest.approx(value, rel=1e-5)
        assert found[name] == near, f"{message}, {name}: {found[name]}, not {value}"


def places(layers, made):
    """By layer and operand, in the order in which they are logged."""
    return {
        (layer, operand): made[i, operand]
        for i, layer in enumerate(layers)
        for operand in OPERANDS
        if (i, operand) in made
    }
