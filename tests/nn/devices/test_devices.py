"""Devices without float64, FP8 and some operators, such as Apple's GPUs: plain code gives the same numbers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_lowbit import quantize
from lightning_lowbit._torch.devices import device_like_mps, frexp, lacks
from lightning_lowbit.formats import ELEMENT_FORMATS, SCALE_FORMATS, table
from lightning_lowbit.kernels import backend, pack_operand, quantize_operand, unpack_operand
from lightning_lowbit.nn import OPERANDS
from lightning_lowbit.nn.casts.traits import CONTRACTION
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.packed import packing_obstacle
from tests.kernels.test_casts import same_bits
from tests.nn.named_casts import CASTS
from tests.tables import each

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
FORMATS = {name: f for name, f in (ELEMENT_FORMATS | SCALE_FORMATS).items() if f.dtype is not None and f.bits == 8}


def test_exponents_and_mantissas_come_from_bits():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 1.0, 2.0**-126, 2.0**-149, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([bits.view(torch.float32), special, torch.arange(-500, 500) * 2.0**-149])
    mantissa, exponent = torch.frexp(values)
    with device_like_mps("cpu"):
        found_mantissa, found_exponent = frexp(values)
    assert same_bits(found_mantissa, mantissa)
    numbers = values.isfinite()
    assert torch.equal(found_exponent[numbers], exponent[numbers])


@each("name", FORMATS)
def test_codes_of_dtypes_that_a_device_lacks(name):
    format = FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(format.dtype).float()
    numbers = codes[values.isfinite()]
    with device_like_mps("cpu"):
        assert lacks(CPU, format.dtype)
        assert same_bits(table.__wrapped__(format, CPU), values)
        encoded = format.encode(values)
        assert format.decode(encoded[values.isnan()]).isnan().all()
    positive_zero = torch.where(codes == 0x80, 0, codes) if name != "e8m0" else codes  # -0 becomes 0
    assert torch.equal(encoded[numbers.long()], positive_zero[numbers.long()])


@each("name", CASTS)
def test_operands_have_the_same_bits(name):
    x, key = torch.randn(32, 96, generator=torch.Generator().manual_seed(1)), torch.tensor(7)
    for cast, dim in {(getattr(CASTS[name], operand), CONTRACTION[operand]): None for operand in OPERANDS}:
        if not isinstance(cast, Cast) or cast.scale.statistic == "absmean":
            continue  # the latter is of means, which a device without float64 sums in float32
        outcomes = []
        for lacking in (False, True):
            with backend("eager"):
                outcomes.append(device_outcome(x, cast, dim, key, lacking))
        for expected, result in zip(*outcomes, strict=True):
            assert same_bits(result, expected), f"{cast} along {dim}"


def device_outcome(x, cast, dim, key, lacking):
    if lacking:
        with device_like_mps("cpu"):
            return device_outcome(x, cast, dim, key, False)
    values, factor = quantize_operand(x, cast, dim, key)
    tensors = [values, quantize(x, cast, dim, key).dequantize()]
    if packing_obstacle(cast) is None:
        packed = pack_operand(x, cast, dim, key)
        tensors += [packed.data, *(t for t in unpack_operand(packed, cast, dim, x.shape, x.dtype) if t is not None)]
    return tensors if factor is None else [*tensors, factor]


@pytest.mark.slow
def test_steps_on_such_a_device_are_those_of_the_cpu():
    command = [sys.executable, "-W", "ignore", "-m", "tests.nn.devices.apple"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
