"""Frozen weights as codes: the bits of training with matrices, in a quarter of the bytes."""

import copy

import pytest
import torch
from torch import nn

from lightning_lowbit import FP4Precision, LinearCasts, convert, pack_frozen, unpack_frozen
from lightning_lowbit.nn import PRESETS, LayerKeys, SharedAmaxes, set_phase
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.nn.layers.state import LayerState
from tests.nn.layers import pass_through
from tests.precision.regression_model import Regression, fitted
from tests.precision.regression_model import state as state_of


def frozen_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 80, bias=False))
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def passed(model, autocast=True):
    """Output and gradient of the input, with the keys of step 1."""
    LayerKeys(model).fill_(1)
    results = pass_through(model, torch.randn(40, 96, generator=torch.Generator().manual_seed(1)), autocast=autocast)
    return results["y"], results["x"]


def test_equals_matrices_to_the_bit():
    for name in PRESETS:
        if name in ("bf16", "nvfp4-row", "ufp4", "fp8-delayed"):
            with pytest.raises(ValueError, match="cannot keep these weights as codes"):
                pack_frozen(frozen_model(), name)
            continue
        for autocast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
            expected, gradient = passed(convert(frozen_model(), name), autocast)
            y, dx = passed(pack_frozen(frozen_model(), name, dtype=dtype), autocast)
            assert torch.equal(y, expected), (name, dtype)
            if LinearCasts.preset(name).dgrad_w == "fprop":
                assert torch.equal(dx, gradient), (name, dtype)


def test_passes_are_those_of_the_quantized_matrices():
    """Of a cast of dgrad, too: NVFP4 of a bfloat16 tensor that is NVFP4 has the same bits; and in high precision."""
    for phase, dtype in (("fqt", torch.bfloat16), ("bf16", torch.float32)):
        packed = pack_frozen(frozen_model(), "nvfp4", dtype=dtype)
        set_phase(packed, phase)
        results = (passed(model, phase == "fqt") for model in (packed, unpack_frozen(copy.deepcopy(packed))))
        assert all(map(torch.equal, *results)), phase


def test_the_backward_pass_keeps_the_bytes():
    model, kept = pack_frozen(frozen_model(), "nvfp4-nvidia"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        passed(model)
    assert model[0].weight.dtype == torch.uint8 and model[0].weight.numel() < 0.6 * 96 * 64
    assert not [t for t in kept if t.shape in ((64, 96), (96, 64))]
    assert any(t.data_ptr() == model[0].weight.data_ptr() for t in kept)


def test_a_state_dict_loads_as_bytes_and_as_matrices():
    packed, other = pack_frozen(frozen_model(), "nvfp4"), frozen_model()
    nn.init.zeros_(other[0].weight)
    for state in (packed.state_dict(), frozen_model().state_dict()):
        loaded = pack_frozen(copy.deepcopy(other), "nvfp4")
        loaded.load_state_dict(state)
        assert torch.equal(loaded[0].weight, packed[0].weight)


def several_products():
    return nn.Sequential(nn.Linear(32, 32), nn.MultiheadAttention(32, 2)).requires_grad_(False)


def projections():
    return nn.ModuleDict({"q": nn.Linear(32, 32), "k": nn.Linear(32, 32)}).requires_grad_(False)


def test_refusals_change_nothing():
    packed, sharing = pack_frozen(frozen_model(), "nvfp4"), convert(projections(), "nvfp4")
    SharedAmaxes(sharing, ["q|k"]).measure()
    data, mixed = packed[0].weight, nn.Sequential(nn.Linear(32, 32), frozen_model())
    pack_frozen(convert(mixed, "nvfp4"), "nvfp4")
    is_packed = r"it is kept as codes of e2m1.* \(unpack_frozen makes it a matrix\)"
    for call, message in (
        (lambda: pack_frozen(nn.Sequential(nn.Linear(32, 32)), "nvfp4"), "none is frozen"),
        (lambda: pack_frozen(frozen_model(), "fp8-delayed"), "scaled by the history"),
        (lambda: pack_frozen(frozen_model(), "ufp4"), "rotates weights"),
        (lambda: convert(packed, "int4"), "Give the layer casts with the same fprop_w"),
        (lambda: convert(mixed, "int4"), "same fprop_w"),
        (lambda: packed(torch.randn(4, 32)), "takes 96 features"),
        (lambda: pack_frozen(packed, "int4"), is_packed),
        (lambda: pack_frozen(packed, "nvfp4", dtype=torch.float32), is_packed),
        (lambda: SharedAmaxes(pack_frozen(projections(), "nvfp4"), ["q|k"]), "q, k cannot .* kept as codes"),
        (lambda: pack_frozen(sharing, "nvfp4"), "shares an amax"),
        (lambda: pack_frozen(several_products(), "nvfp4"), r"1\.in_proj: MultiheadAttention does not keep"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert pack_frozen(packed, "nvfp4")[0].weight is data, "a second call"
    for model in (packed, mixed):
        assert {layer.full_casts for layer in quantized_layers(model).values()} == {LinearCasts.preset("nvfp4")}
    assert not quantized_layers(pack_frozen(several_products(), "nvfp4", skip=["1"])[1])


def test_a_run_refuses_casts_that_a_packed_weight_cannot_have_for_all_layers():
    model, plugin = Regression(), FP4Precision(quantize_output=True)
    model.first.requires_grad_(False)
    pack_frozen(model, "nvfp4", only=["first"])
    fitted(plugin, model)
    with pytest.raises(ValueError, match="The weight of first is kept as codes of e2m1"):
        plugin.set_casts({".*": "int4"})
    assert {*plugin.casts_of(".*").values()} == {LinearCasts.preset("nvfp4")}
    assert "casts" not in state_of(plugin)


def test_only_frozen_weights_are_packed_and_settings_of_other_layers_stay():
    model = nn.Sequential(nn.Linear(32, 32), frozen_model(), nn.Linear(32, 32))
    convert(model[0], "mxfp8", exact=True, save="codes")
    before = copy.copy(model[0].lowbit)
    pack_frozen(model, "nvfp4")
    assert all(getattr(model[0].lowbit, name) == getattr(before, name) for name in LayerState.__slots__)
    assert model[1][0].lowbit.frozen is not None
    assert type(model[2]) is nn.Linear


def test_the_dtype_of_the_computation_may_be_another():
    model = pack_frozen(frozen_model(), "nvfp4")  # in bfloat16
    for phase in ("fqt", "qaf", "hp-forward", "bf16"):
        set_phase(model, phase)
        y, dx = passed(model, autocast=False)
        assert y.dtype == torch.float32 and y.isfinite().all() and dx.isfinite().all(), phase


def test_training_resumes_to_the_bit(tmp_path):
    def trained(steps, resume=None):
        model = Regression()
        model.mlp.requires_grad_(False)
        pack_frozen(model, "nvfp4-nvidia")
        return fitted(FP4Precision("nvfp4-nvidia"), model, resume, max_steps=steps)

    whole, half = trained(4).lightning_module, trained(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = trained(4, tmp_path / "half.ckpt").lightning_module
    assert resumed.mlp.up_proj.weight.dtype == torch.uint8
    assert torch.equal(resumed.first.weight, whole.first.weight)
    assert not torch.equal(whole.first.weight, half.lightning_module.first.weight)
