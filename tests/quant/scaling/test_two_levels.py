"""Scales of two levels, with amaxes from outside too."""

from dataclasses import replace

import pytest
import torch

from lightning_lowbit import Cast, Scale, quantize
from lightning_lowbit.formats import SCALE_FORMATS
from tests.quant.tensors import EXMY, float_scales, same, sample
from tests.tables import each


@pytest.mark.parametrize(("format", "largest"), [("e4m3", 256), ("e5m2", 2.0**15), ("e3m4", 16)])
def test_four_over_six_leaves_room_for_six_fourths(format, largest):
    scale = Scale(format, 16, two_level=True, four_over_six="mse")
    assert scale.largest == largest and 1.5 * largest <= SCALE_FORMATS[format].max < 3 * largest
    x = torch.rand(64, 16) + 3  # a block of near equals is better off with its maximum at 4
    error, plain = (
        (quantize(x, Cast("e2m1", replace(scale, top=top))).dequantize() - x).square().mean()
        for top in (None, SCALE_FORMATS[format].max)
    )
    assert error < plain, f"with room {error}, without {plain}"


@each(
    ("scale", "top"),
    [
        (Scale(two_level=True), 448),
        (Scale(two_level=True, top=256), 256),
        (Scale("e5m2", 16, two_level=True), 57344),
        (Scale("e1m6", 16, "up", two_level=True, top=2.5), 2.5),
        (Scale("e8m0", 16, two_level=True), 1),
        (Scale("e8m0", 16, two_level=True, top=4096), 4096),
        (Scale("e4m3", "row", two_level=True), 448),
        (Scale("e4m3", (4, 16), two_level=True, top=256, four_over_six="mse"), 256),
        (Scale("e4m3", 16, two_level=True, four_over_six="mse"), 256),  # whose 6/4, 384, is a scale too
        (Scale("e5m2", 16, two_level=True, four_over_six="mae"), 32768),
    ],
)
def test_top_is_the_scale_of_the_largest_block(scale, top):
    x = torch.tensor([[1.5] + [0.0] * 31, [1e-3] * 32])
    found = quantize(x, Cast("e2m1", scale))
    highest = float_scales(found).max().item()
    assert highest in ((top,) if scale.four_over_six is None else (top, 1.5 * top)), f"{scale}: {highest}"
    torch.testing.assert_close(found.dequantize()[0, 0].item(), 1.5, rtol=2.0**-21, atol=0)
    expected = torch.div(torch.tensor(top * 6.0), torch.tensor(1.5)).reciprocal()
    same(found.tensor_scale, expected, f"{scale}: 1/S")


@each("element", ["e2m1", "int8", "ternary", "e5m2"])
@each("top", [2.0**100, 2.0**127])
def test_a_large_top_is_honored_or_refused(element, top):
    """Powers of two move scales and leave codes alone; what is too large for float32 is refused, and by us."""
    x = sample(2, 32)
    x = x / x.abs().max() * 2.0**30  # so that S is in range
    try:
        cast = Cast(element, Scale("e8m0", 16, two_level=True, top=top))
    except ValueError as refused:
        assert "top" in str(refused), f"{element}, top {top}: {refused}"  # noqa: PT017
        return
    found, plain = quantize(x, cast), quantize(x, cast.replace(scale={"top": None}))
    same(found.codes, plain.codes, f"{element}, top {top}, codes")
    torch.testing.assert_close(found.dequantize(), plain.dequantize(), rtol=1e-6, atol=0, msg=f"{element}, top {top}")


@pytest.mark.parametrize("top", [2.0**-120, 2.0**-9])
def test_a_small_top_gives_small_scales_and_no_nan(top):
    """S may be subnormal for a large tensor, and 1/S must not be infinite."""
    for amax in (1e-30, 1.0, 3e38):
        found = quantize(torch.tensor([[amax, -amax / 3]]), Cast("e2m1", Scale(two_level=True, top=top)))
        assert found.dequantize().isfinite().all(), f"top {top}, amax {amax}: {found.dequantize().tolist()}"


@each("scale_format", [*EXMY, "e8m0"])
def test_an_amax_that_is_far_too_small(scale_format):
    """What exceeds the largest scale saturates, however far it does: b * S may be infinite, its scale is not small."""
    scale = Scale(scale_format, 16, two_level=True)
    found = quantize(torch.full((1, 4), 2.0**60), Cast("e2m1", scale), amax=torch.tensor(2.0**-100))
    assert float_scales(found).item() >= scale.storage.max / 2, f"{scale_format}: scale {float_scales(found).item()}"
    assert found.codes.tolist() == [[7] * 4], f"{scale_format}: not the largest code"
