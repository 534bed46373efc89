"""Callbacks see the weights that the forward pass rounds, to the bit, and no others."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from lightning_lowbit import FP8Precision, IntegerPrecision, LowBitPrecision, TernaryPrecision, convert
from lightning_lowbit.callbacks.monitors.latent_weights import latent_weights, nearest_cast, whole_layers
from lightning_lowbit.nn import AmaxHistories, QuantizedLayer, set_blend
from lightning_lowbit.precision.base import compute_dtype
from lightning_lowbit.quant import quantize
from tests.lightning_imports import BoringModel, Callback, MisconfigurationException, quiet_trainer
from tests.nn.layers import remember, spied, value
from tests.tables import each


class Two(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


class LastForward(Callback):
    """What the forward pass of the last step made of the first layer's weight, and what the callbacks' view makes."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        layer = pl_module.layer[0]
        ((_, weight),) = latent_weights({"": layer}, compute_dtype(trainer.precision_plugin))
        self.found = weight.quantize().dequantize()
        with spied() as seen, trainer.precision_plugin.forward_context():
            layer(torch.randn(4, 32, requires_grad=True))
        self.expected = value(seen["fprop_w"]).float()


PLUGINS = {
    "ternary": lambda: TernaryPrecision(backend="emulated", quantize_output=True),
    "int4 in fp32": lambda: LowBitPrecision("int4", compute_dtype="fp32"),
    "int4 with zero points": lambda: IntegerPrecision(4, None, group="row", symmetric=False, exact=True),
    "fp8 delayed": lambda: FP8Precision("delayed", backend="emulated"),
    "nvfp4": lambda: LowBitPrecision("nvfp4"),
    "nvfp4, one amax": lambda: LowBitPrecision("nvfp4", shared_amax=["0|2"]),
    "fp8 delayed, one amax": lambda: FP8Precision("delayed", backend="emulated", shared_amax=["0|2"]),
}


@each("plugin", PLUGINS)
def test_it_is_what_the_forward_pass_uses(plugin):
    seen = LastForward()
    quiet_trainer(PLUGINS[plugin](), max_steps=2, callbacks=[seen], limit_val_batches=0).fit(Two())
    torch.testing.assert_close(seen.found, seen.expected, rtol=1e-6, atol=0)


def test_delayed_scaling_uses_the_amax_in_force():
    layer = convert(nn.Linear(16, 4), "fp8-delayed")
    AmaxHistories(layer)
    ((_, empty),) = latent_weights({"a": layer}, torch.float32)
    assert empty.amax == layer.weight.abs().max(), "an empty history means current scaling"
    remember(layer, 3.0)
    ((name, weight),) = latent_weights({"a": layer}, torch.float32)
    assert (name, weight.amax) == ("a", 3.0)
    assert weight.quantize().scales.item() == pytest.approx(3.0 / 448)


@each(
    ("casts", "is_seen"),
    [
        ("ternary", True),
        ("nvfp4", True),
        ("bf16", False),
        ("ufp4", False),  # rotated
        ({"preset": "fp8-current", "smooth": "channel"}, False),
        ({"preset": "int4", "fprop_w": {"rounding": "stochastic"}}, False),
    ],
)
def test_weights_that_are_rounded_to_nearest_as_they_are(casts, is_seen):
    layer = convert(nn.Linear(32, 8), casts)
    assert (nearest_cast(layer.casts) == layer.casts.fprop_w) == (is_seen or casts == "bf16")
    assert (nearest_cast(layer.casts) is not None) == is_seen
    assert len(list(latent_weights({"a": layer}, torch.bfloat16))) == is_seen


def test_phases_and_blending():
    layers = {name: convert(nn.Linear(32, 8), "int4") for name in "ab"}
    layers["b"].casts = layers["b"].full_casts.phase("hp-forward")
    assert [name for name, _ in latent_weights(layers, torch.float32)] == ["a"]
    for blend, seen in ((0.0, []), (0.5, ["a"]), (1.0, ["a"])):
        set_blend(layers["a"], blend)
        assert [name for name, _ in latent_weights(layers, torch.float32)] == seen, f"λ = {blend}"


def test_weights_stored_the_other_way_round():
    from transformers.pytorch_utils import Conv1D

    layer = convert(Conv1D(8, 32), "int4")
    ((_, weight),) = latent_weights({"a": layer}, torch.float32)
    assert weight.values.shape == (8, 32)
    assert not weight.values.requires_grad


def trained(module, wrapped=None):
    """A Trainer and its module, as far as they are asked for."""
    return SimpleNamespace(model=wrapped or module, strategy=SimpleNamespace()), module


def test_names_are_without_wrappers():
    model = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager"), nn.Linear(8, 8))
    layers = whole_layers(Callback(), *trained(convert(model, "int4")))
    assert list(layers) == ["0.0", "1"]
    assert all(isinstance(layer, QuantizedLayer) for layer in layers.values())


def test_sharded_weights_are_gathered_or_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = convert(nn.Sequential(nn.Linear(8, 8)), "int4")
        flat = FullyShardedDataParallel(
            convert(nn.Sequential(nn.Linear(8, 8)), "int4"),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.NO_SHARD,  # what it would take, and warn of, for one process
        )
        whole = model[0].weight.detach()
        model[0].weight = nn.Parameter(distribute_tensor(whole, DeviceMesh("cpu", [0]), [Shard(0)]))
        gathered = fully_shard(convert(nn.Sequential(nn.Linear(8, 8)), "int4"), mesh=DeviceMesh("cpu", [0]))
        gathered(torch.ones(1, 8))  # as in a sanity check; the root keeps what it has gathered
        for one in (trained(model), trained(flat.module, wrapped=flat), trained(gathered)):
            with pytest.raises(MisconfigurationException, match="needs whole weights .* shards them: leave it out"):
                whole_layers(Callback(), *one)
        ((_, weight),) = latent_weights({"0": model[0]}, torch.bfloat16)
        assert type(weight.values) is torch.Tensor, "it was not gathered"
        assert torch.equal(weight.values, whole.bfloat16())
        assert torch.equal(weight.quantize().codes, quantize(whole.bfloat16(), weight.cast).codes)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@each("preset", ["nvfp4", "nvfp4-nvidia", "fp8-current", "ternary"])
def test_a_sample_of_a_large_weight_has_the_scales_of_the_whole(preset):
    ((_, weight),) = latent_weights({"": convert(nn.Linear(256, 512), preset)}, torch.float32)
    some = weight.sample()
    needs_all = weight.cast.scale.block == "tensor" and weight.cast.scale.statistic != "absmax"
    assert len(some.values) == (512 if needs_all else 128), f"of {weight.cast}"
    whole = weight.quantize().dequantize()
    rows = (weight.values[:, None] == some.values[None]).all(-1).nonzero()[:, 0]
    assert torch.equal(some.quantize().dequantize(), whole[rows]), f"rows of {weight.cast} are quantized otherwise"
    small = convert(nn.Linear(32, 32), preset)
    ((_, weight),) = latent_weights({"": small}, torch.float32)
    assert torch.equal(weight.sample().values, small.weight), "a small weight is looked at whole"
