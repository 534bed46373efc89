"""Layers that share an amax quantize their weights as one layer would that holds all of them."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_lowbit import LowBitPrecision, convert
from lightning_lowbit.distributed import parameter_amaxes
from lightning_lowbit.nn import AmaxHistories, LayerKeys, SharedAmaxes
from tests.nn.layers import remember, spied, value
from tests.precision.regression_model import On, Regression, fitted
from tests.tables import each

CASTS = ("nvfp4", "nvfp4-4over6", "nvfp4-nvidia", "fp8-current", "fp8-delayed")


class Attention(nn.Module):
    """Projections of one input, whose weights are of other sizes; and the same as one layer."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 64), nn.Linear(32, 16), nn.Linear(32, 16)
        self.o_proj = nn.Linear(96, 32)
        for size, layer in zip((1.0, 3.0, 0.2), self.projections, strict=True):
            layer.weight.data.mul_(size)

    @property
    def projections(self):
        return self.q_proj, self.k_proj, self.v_proj

    def fused(self):
        layer = nn.Linear(32, 96)
        layer.weight.data = torch.cat([part.weight.data for part in self.projections])
        layer.bias.data = torch.cat([part.bias.data for part in self.projections])
        return layer

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.projections], -1)


def prepare(module, casts):
    LayerKeys(convert(module, casts)).fill_(1)
    AmaxHistories(module)
    return module


@pytest.mark.pairwise(1)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("casts", CASTS)
def test_they_are_as_one_layer(casts, autocast):
    parts = Attention()
    one, apart, parts = prepare(parts.fused(), casts), prepare(copy.deepcopy(parts), casts), prepare(parts, casts)
    SharedAmaxes(parts, ["(q|k|v)_proj"]).measure()
    x = torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected, others = parts(x), one(x), apart(x)
    assert torch.equal(found, expected)
    assert not torch.equal(others, expected), "so it is without sharing"


@each("casts", CASTS)
def test_both_gemms_of_a_weight_use_it(casts):
    """Half of all weights are those of a layer with a larger one; their values are multiples of its steps."""
    parts = prepare(Attention(), casts)
    SharedAmaxes(parts, ["(q|k|v)_proj"]).measure()
    largest = parts.k_proj.weight.abs().max()
    with spied() as seen:
        parts.v_proj(torch.randn(8, 32, requires_grad=True)).sum().backward()
    layer = nn.Linear(33, 16)  # one more column holds the largest weight
    layer.weight.data = torch.cat([parts.v_proj.weight.data, largest.expand(16, 1)], 1)
    prepare(layer, casts)
    with spied() as own:
        layer(torch.randn(8, 33, requires_grad=True)).sum().backward()
    for operand in ("fprop_w", "dgrad_w"):
        assert torch.equal(value(seen[operand]), value(own[operand])[:, :32]), operand


def test_what_delayed_scaling_remembers_is_that_of_the_group():
    parts = prepare(Attention(), "fp8-delayed")
    shared = SharedAmaxes(parts, ["(q|k|v)_proj"])
    histories = remember(parts, 1.0)
    shared.measure()
    histories.recording = True
    parts(torch.randn(8, 32)).sum().backward()
    histories.advance_()
    last = {name: amax[-1] for name, amax in histories.state_dict()["amax_history"].items() if "fprop_w" in name}
    largest = parts.k_proj.weight.abs().max()
    assert {name: amax for name, amax in last.items() if "o_proj" not in name} == {
        f"{name}/fprop_w": largest for name in ("q_proj", "k_proj", "v_proj")
    }


def test_new_weights_have_a_new_amax_and_backward_passes_the_one_of_before():
    parts = prepare(Attention(), "nvfp4")
    shared = SharedAmaxes(parts, ["(q|k|v)_proj"])
    gradients = []
    for disturbed in (False, True):
        shared.measure()
        parts.zero_grad()
        x = torch.ones(8, 32, requires_grad=True)
        y = parts(x)
        if disturbed:
            parts.k_proj.weight.data.mul_(2)
            shared.measure(partial(parameter_amaxes, device=torch.device("cpu")))
            assert parts.q_proj.lowbit.weight_amax == parts.k_proj.weight.abs().max()
            parts.k_proj.weight.data.div_(2)
        y.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    shared.release()
    assert parts.q_proj.lowbit.weight_amax is None


@pytest.mark.slow
def test_a_compiled_layer(compiler):
    parts = prepare(Attention(), "nvfp4")
    shared, x = SharedAmaxes(parts, ["(q|k|v)_proj"]), torch.randn(8, 32)
    compiled = torch.compile(parts, backend=compiler, fullgraph=True)
    for _ in range(2):
        shared.measure()
        assert torch.equal(compiled(x), parts(x))
        with torch.no_grad():
            parts.k_proj.weight.mul_(3)
    assert compiler.frame_count == 1, "measuring compiles anew"


@each(
    "casts, patterns, message",
    [
        ("nvfp4", ["(q|k)_porj"], "matches no linear layer"),
        ("nvfp4", "q_proj", "is a list of patterns; got the string 'q_proj'"),
        ("nvfp4", ["o_proj"], "each layer that 'o_proj' matches is the only one of its module, e.g. o_proj"),
        ("nvfp4", ["(q|k)_proj", "(k|v)_proj"], "k_proj would be in several groups"),
        ("mxfp4", ["(q|k)_proj"], "q_proj, k_proj cannot share an amax: .* has no scale that the largest magnitude"),
        ("ternary", ["(q|k)_proj"], "has no scale that the largest magnitude of the tensor decides"),
        ({"preset": "nvfp4", "hadamard": {"fprop": 16}}, ["(q|k)_proj"], "its forward pass rotates weights"),
        ({"preset": "nvfp4", "smooth": "channel"}, ["(q|k)_proj"], "its input is smoothed"),
        ("bf16", ["(q|k)_proj"], "all layers that the patterns match are in high precision"),
    ],
)
def test_what_cannot_be_shared_is_refused(casts, patterns, message):
    with pytest.raises(ValueError, match=f"shared_amax.*{message}"):
        SharedAmaxes(convert(Attention(), casts), patterns)


def test_weights_that_a_pass_computes_are_refused():
    """Before the pass they are those of the last one, and after a checkpoint was loaded those of no model."""
    model = Attention()
    prune.l1_unstructured(model.k_proj, "weight", 0.5)
    with pytest.raises(ValueError, match="shared_amax: k_proj cannot share an amax: its weight or bias is computed"):
        SharedAmaxes(convert(model, "nvfp4"), ["(q|k)_proj"])


def test_all_groups_that_cannot_share_are_named():
    model = nn.ModuleList(Attention() for _ in range(3))
    also = "Nor can 1.q_proj, 1.k_proj, 2.q_.*casts that have one, with overrides; layers in high precision, by skip"
    with pytest.raises(ValueError, match=f"0.q_proj, 0.k_proj cannot .* {also}"):
        SharedAmaxes(convert(model, "mxfp4"), ["(q|k)_proj"])


def test_casts_that_cannot_be_shared_are_refused_in_a_run():
    def change(*_):
        with pytest.raises(ValueError, match="shared_amax: mlp.gate_proj, mlp.up_proj cannot share"):
            plugin.set_casts({"up_proj": "fp8-current"})
        plugin.set_casts({".*": "bf16"})
        plugin.set_casts({"head": "nvfp4"})

    plugin = LowBitPrecision("nvfp4", shared_amax=["gate_proj|up_proj"])
    fitted(plugin, callbacks=[On(on_train_batch_start=change)], max_steps=1)


def test_other_casts_are_refused_before_anything_is_converted():
    model = Regression()
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    plugin = LowBitPrecision("nvfp4", overrides={re.escape(names[0]): "fp8-current"}, shared_amax=[".*"])
    with pytest.raises(ValueError, match="their weights have other casts"):
        fitted(plugin, model)
    assert all(type(layer) is nn.Linear for name, layer in model.named_modules() if name in names)
