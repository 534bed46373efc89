"""What follows from casts: operands, native GEMMs, facts about weights and who takes which of them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_lowbit import Cast, LinearCasts, Scale, convert
from lightning_lowbit.export import weights as exported
from lightning_lowbit.nn import OPERANDS, PRESETS
from lightning_lowbit.nn.casts.facts import CAST_FACTS, LAYER_FACTS, obstacle
from lightning_lowbit.nn.conversion import bake, frozen, shared_amax
from lightning_lowbit.nn.sharded import gather
from tests.nn.casts.examples import DELAYED, E4M3, E5M2, INT4, MIXED, NEAREST, SIX
from tests.nn.layers import GEMMS
from tests.tables import each


def test_former_spellings_warn():
    with pytest.warns(DeprecationWarning, match="quantised_gemms is now quantized_gemms"):
        assert SIX.quantised_gemms == SIX.quantized_gemms
    with pytest.warns(DeprecationWarning, match="quantises_x_or_w is now quantizes_x_or_w"):
        assert SIX.quantises_x_or_w


def of_gpus(casts):
    """GEMMs that GPUs compute natively, and CPUs on integers, with the kind."""
    return {gemm: kinds[0] for gemm, kinds in casts.traits.native_kinds.items() if kinds[0] != "cpu"}


@each(
    ("name", "native"),
    [
        *(
            (name, {})
            for name in PRESETS
            if not name.startswith(("fp8-", "nvfp4", "mxfp")) and name not in ("ternary", "quartet2")
        ),
        ("mxfp6", {}),
        ("nvfp4-row", {}),
        ("quartet2", {"fprop": "nvfp4"}),
        ("mxfp8-nvfp4", {"fprop": "mxfp8", "dgrad": "nvfp4", "wgrad": "nvfp4"}),
        ("nvfp4-mxfp8", {"fprop": "nvfp4", "dgrad": "mxfp8", "wgrad": "mxfp8"}),
        *((name, dict.fromkeys(GEMMS, "nvfp4")) for name in ("nvfp4", "nvfp4-nvidia", "nvfp4-4over6")),
        *((name, dict.fromkeys(GEMMS, "mxfp4")) for name in ("mxfp4", "mxfp4-rht")),
        *((name, dict.fromkeys(GEMMS, name)) for name in ("mxfp8", "fp8-blockwise")),
        *((name, dict.fromkeys(GEMMS, "fp8")) for name in ("fp8-delayed", "fp8-current", "fp8-row")),
        ("ternary", {"fprop": "int8"}),
    ],
)
def test_native_gemms_of_presets(name, native):
    casts = LinearCasts.preset(name)
    assert of_gpus(casts) == native
    assert of_gpus(casts.phase("qaf")) == {gemm: kind for gemm, kind in native.items() if gemm == "fprop"}
    backward = {gemm: kind for gemm, kind in native.items() if gemm != "fprop"}
    if casts.dgrad_w == "fprop":  # which is then in high precision
        backward.pop("dgrad", None)
    assert of_gpus(casts.phase("hp-forward")) == backward


TILES = Cast("e2m1", Scale("e4m3", (16, 16), two_level=True))


@each(
    ("cast", "one"),
    [
        (E4M3, True),
        (E5M2, True),
        (DELAYED, True),
        (TILES, True),
        (Cast("int4", Scale("e4m3", (4, 8))), True),
        (NEAREST, False),  # whose blocks lie along another axis
        (INT4, False),
        (Cast("e4m3", Scale("fp32", "row", "power_of_two")), False),
        (replace(E4M3, rounding="stochastic"), False),  # whose random bits are the operand's own
        (replace(TILES, rounding="stochastic"), False),
        (None, False),
    ],
)
def test_operands_that_are_one(cast, one):
    for first, second in (("fprop_w", "dgrad_w"), ("dgrad_g", "wgrad_g")):
        casts = LinearCasts(**{first: cast, second: cast})
        others = {"dgrad_w", "wgrad_g"} - {second}
        assert casts.shared(second) == one
        assert not any(casts.shared(other) for other in others)
        if cast is None:
            continue
        assert not casts.replace(**{first: None}).shared(second)
        assert not casts.replace(**{first: MIXED.wgrad_g}).shared(second), "not if the two differ"
        for gemm in GEMMS:
            touched = gemm in (first.split("_")[0], second.split("_")[0])
            six = LinearCasts(**{**dict.fromkeys(OPERANDS, E5M2), first: cast, second: cast})
            assert six.replace(hadamard={gemm: 16}).shared(second) == (one and not touched), f"{gemm} rotated"
            assert six.replace(subtract_mean=[gemm]).shared(second) == (one and not touched), f"{gemm} centered"
    assert not LinearCasts(fprop_w=cast, dgrad_w="fprop").shared("dgrad_w"), "what is reused is no cast of its own"


USERS = (bake, frozen, shared_amax, gather, exported)


def test_every_name_that_a_user_takes_is_a_fact():
    for user in USERS:
        assert {*CAST_FACTS, *LAYER_FACTS} >= user.TAKES, user


def test_every_fact_is_refused_by_somebody():
    assert not set.intersection(*(user.TAKES for user in USERS))


def test_a_new_fact_is_refused_by_all(monkeypatch):
    casts = LinearCasts.preset("nvfp4").replace(fprop_x=None)
    layer = convert(nn.Sequential(nn.Linear(32, 32)), casts)[0]
    monkeypatch.setitem(CAST_FACTS, "new", (lambda casts: casts.fprop_w, "it is new: {casts.fprop_w}"))
    monkeypatch.setitem(
        LAYER_FACTS, "blue", (lambda layer: layer.lowbit.blend is not None, "it is blue: {layer.lowbit.blend:g}")
    )
    takes = {*CAST_FACTS, *LAYER_FACTS}
    for user in USERS:
        assert obstacle(casts, takes - {"new"} | user.TAKES, layer) == f"it is new: {casts.fprop_w}"
    layer.lowbit.blend = torch.tensor(0.5)
    assert obstacle(casts, takes - {"blue"}, layer) == "it is blue: 0.5"
    assert obstacle(casts, takes, layer) is None
