"""Layers leave sums of their operands and gradients where somebody asks, and compute the same to the bit."""

import pytest
import torch
from torch import nn

from lightning_lowbit.callbacks.monitors.operand_statistics import QuantizedOperands
from lightning_lowbit.nn import OPERANDS, QuantizedLayer
from lightning_lowbit.nn.core.watch import Watch
from lightning_lowbit.quant import Cast
from lightning_lowbit.quant.statistics import SUMS
from tests.nn.layers import gradients, identical, layer_like, net, run, spied, value
from tests.nn.operand_sums import assert_numbers, captured, numbers_of, places
from tests.tables import each

CPU = torch.device("cpu")
LAYERS = ("first", "second", "head")


def watch_of(model, what="operand_sums"):
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    return QuantizedOperands(layers) if what == "operand_sums" else Watch(layers, what)


def numbers(watch):
    return watch.numbers({name: column.tolist() for name, column in watch.measure().items()})


def batch(seed=0):
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(seed))


@each("casts", ["nvfp4", "nvfp4-nvidia", "mxfp4-rht", "fp8-current", "fp8-delayed", "ternary", "int4"])
def test_rows_tell_what_casts_did(casts):
    model, _ = net(casts)
    watch = watch_of(model)
    watch.start(CPU)
    with captured() as made:
        for seed, size in ((0, 1.0), (1, 30.0)):
            gradients(model, size * batch(seed))
    watch.stop()
    expected = places(LAYERS, made)
    found = numbers(watch)
    assert {(layer, operand) for layer, row in found.items() for operand in row} == set(expected)
    own = {operand for operand in OPERANDS if isinstance(getattr(model.first.casts, operand), Cast)}
    assert {operand for _, operand in expected} == own
    for (layer, operand), operands in expected.items():
        assert len(operands) == 2
        assert_numbers(found[layer][operand], numbers_of(operands), f"{layer}, {operand}")


@each("what", ["operand_sums", "gradient_sums"])
@each("casts", ["nvfp4", "fp8-delayed", "ternary"])
def test_watching_changes_nothing(casts, what):
    found = []
    for watched in (False, True):
        model, _ = net(casts, dropout=0.2)
        watch = watch_of(model, what)
        if watched:
            watch.start(CPU)
        found.append(gradients(model, batch()))
        assert watch.sums.any() == watched
    identical(found[1], found[0])


@pytest.mark.parametrize("what", ["operand_sums", "gradient_sums"])
def test_only_while_it_is_on(what):
    model, keys = net()
    watch = watch_of(model, what)
    shape = (3, 6, 8) if what == "operand_sums" else (3, 2)
    assert watch.sums.shape == shape
    assert getattr(model.first.lowbit, what) is None
    watch.start(CPU)
    assert watch.sums.dtype == torch.float64
    for layer, row in zip(watch.layers.values(), watch.rows, strict=True):
        assert getattr(layer.lowbit, what).data_ptr() == row.data_ptr()
    gradients(model, batch())
    watch.stop()
    assert all(getattr(layer.lowbit, what) is None for layer in watch.layers.values())
    once = watch.sums.clone()
    gradients(model, batch())
    assert torch.equal(watch.sums, once), "what came after it stopped counts"
    watch.resume()
    keys.fill_(1)
    gradients(model, batch())
    added = len(SUMS) if what == "operand_sums" else 2
    assert torch.equal(watch.sums[..., :added], 2 * once[..., :added]), "two equal passes are twice as much"
    assert torch.equal(watch.sums[..., added:], once[..., added:]), "the largest scales of both"
    watch.start(CPU)
    assert not watch.sums.any(), "rows begin empty"


def test_recomputed_passes_count_twice_with_the_same_ratios():
    found = []
    for recompute in (False, True):
        model, _ = net(recompute=recompute)
        watch = watch_of(model)
        watch.start(CPU)
        gradients(model, batch())
        found.append((watch.sums, numbers(watch)))
    (once, ratios), (twice, same) = found
    assert torch.equal(twice[0, :2, 0], 2 * once[0, :2, 0])
    assert same == ratios


def test_a_layer_without_tokens():
    """An expert that no token was sent to."""
    for what in ("operand_sums", "gradient_sums"):
        model, _ = net()
        watch = watch_of(model, what)
        watch.start(CPU)
        model.first(torch.zeros(0, 32, requires_grad=True)).sum().backward()
        assert not watch.sums[1:].any()
        if what == "operand_sums":
            assert watch.sums[0, :, 0].tolist() == [0, 32 * 48, 0, 32 * 48, 0, 0], "the weight was quantized"
        else:
            assert not watch.sums.any()


@each("casts", ["nvfp4", "nvfp4-nvidia", "fp8-current", "ternary", {"preset": "ternary", "wgrad_x": None}])
def test_gradients_in_both_precisions(casts):
    """By hand, from the operands that met: those of the forward pass where the backward pass takes them over."""
    layer = layer_like(nn.Linear(32, 16, bias=False), casts, exact=True)
    watch = watch_of(layer, "gradient_sums")
    watch.start(CPU)
    x, g = torch.randn(24, 32), torch.randn(24, 16)
    with spied() as seen:
        found = run(layer, x, g)
    dw, exact = value(seen["wgrad_g"]).t() @ value(seen["wgrad_x"]), g.double().t() @ x.double()
    torch.testing.assert_close(found["weight"].double(), dw, rtol=1e-5, atol=1e-5)
    expected = [(dw - exact).square().sum().item(), exact.square().sum().item()]
    assert watch.sums[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-8)
    assert (watch.sums[0, 0] > 1e-5 * watch.sums[0, 1]) == isinstance(casts, str)


@each(("autocast", "frozen"), [(False, False), (True, False), (False, True)])
def test_no_error_without_quantized_operands_and_nothing_of_a_frozen_weight(autocast, frozen):
    """In the phase of quantization-aware finetuning both gradients are one."""
    layer = layer_like(nn.Linear(32, 16), "nvfp4")
    layer.casts = layer.full_casts.phase("qaf")
    layer.weight.requires_grad_(not frozen)
    watch = watch_of(layer, "gradient_sums")
    watch.start(CPU)
    run(layer, torch.randn(24, 32), torch.randn(24, 16), autocast=autocast)
    noise, signal = watch.sums[0].tolist()
    assert noise == 0
    assert (signal > 0) != frozen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "casts", "recompute"),
    [("operand_sums", "nvfp4", True), ("operand_sums", "ternary", False), ("gradient_sums", "nvfp4", False)],
)
def test_compiled(compiler, what, casts, recompute):
    model, twin = (net(casts, recompute=recompute)[0] for _ in range(2))
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    watches = [watch_of(model, what), watch_of(twin, what)]
    for step, graphs in enumerate((1, 2, 2, 2, 2)):
        for watch in watches:
            if step % 2:
                watch.start(CPU)
        for seed in (step, step + 10):
            identical(gradients(compiled, batch(seed)), gradients(twin, batch(seed)), f"step {step}")
        for watch in watches:
            watch.stop()
        assert watches[0].sums.any() == (step > 0)
        sums = [watch.sums.clone() for watch in watches]
        if recompute:  # in a graph, without the pass of the checkpoint
            sums = [each[..., :6] / each[..., :1].clamp(min=1) for each in sums]
        torch.testing.assert_close(*sums, rtol=1e-6, atol=0, msg=lambda m, at=step: f"step {at}: {m}")
        assert compiler.frame_count == graphs, f"{compiler.frame_count} compilations in step {step}"
