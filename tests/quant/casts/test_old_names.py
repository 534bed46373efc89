"""The old name of a field of a cast: it warns, and means what the new one does."""

import warnings
from dataclasses import replace

import pytest

from lightning_lowbit.nn import LinearCasts
from lightning_lowbit.precision.checkpoints.trained import Trained
from lightning_lowbit.quant import Cast, Scale
from tests.tables import each

CAST = Cast("int4", Scale("fp32", 32), round_to_bfloat16=True)


@each(
    "make",
    [
        lambda: Cast("int4", Scale("fp32", 32), rounded=True),
        lambda: Cast("int4", Scale("fp32", 32)).replace(rounded=True),
        lambda: replace(Cast("int4", Scale("fp32", 32)), rounded=True),
        lambda: LinearCasts.of({"fprop_w": {"element": "int4", "scale": {"format": "fp32"}, "rounded": True}}).fprop_w,
        lambda: LinearCasts.of({"preset": "int4", "every": {"rounded": True, "scale": {"block": 32}}}).fprop_w,
    ],
)
def test_the_old_name_warns_and_sets_the_field(make):
    with pytest.warns(DeprecationWarning, match="rounded is deprecated .* it is now Cast.round_to_bfloat16"):
        made = make()
    assert made.round_to_bfloat16 is True
    with pytest.warns(DeprecationWarning, match="Cast.round_to_bfloat16"):
        assert made.rounded is True


def test_checkpoints_with_the_old_name_load_without_a_warning():
    record = Trained({"layer": LinearCasts(fprop_w=CAST)}, "bf16", None, ()).record()
    (casts,) = record["casts"].values()
    casts["fprop_w"]["rounded"] = casts["fprop_w"].pop("round_to_bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Trained.read(record).layers["layer"].fprop_w == CAST
