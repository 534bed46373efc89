"""The same bits again: compiled, checkpointing, dropout, copies; and what a layer shows and refuses."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowbit import LinearCasts, convert
from lightning_lowbit.nn import AmaxHistories, set_blend, set_phase
from tests.nn.layers import Net, gradients, identical, layer_like, net, run, spied
from tests.nn.named_casts import EVERYTHING, IN, ONE_LEVEL, OUT, TOKENS
from tests.tables import each


@each("blend", [None, 0.3])
@each("casts", ["nvfp4", "ternary", "int4", "nvfp4-nvidia", *EVERYTHING])
@each("dropout", [0.0, 0.3])
def test_activation_checkpointing_changes_nothing(dropout, casts, blend):
    x, results = torch.randn(16, 32), []
    for recompute in (True, False):
        model, _ = net(EVERYTHING.get(casts, casts), dropout=dropout, recompute=recompute)
        set_blend(model, blend)
        results.append(gradients(model, x))
    identical(*results, "with checkpointing")


def test_repeated_runs_are_equal_and_steps_are_not():
    x = torch.randn(16, 32)
    model, keys = net()
    first = gradients(model, x)
    torch.rand(100)
    keys.fill_(1)
    identical(gradients(model, x), first, "again")
    keys.fill_(2)
    second = gradients(model, x)
    assert torch.equal(first["y"], second["y"]), "the forward pass of nvfp4 rounds to nearest"
    for name in ("x", "first.weight", "head.weight"):
        assert not torch.equal(first[name], second[name]), f"{name}: the next step rounds as this one did"
    keys.fill_(1)
    identical(gradients(model, x), first, "the first step again")


def test_copies_and_state_dicts():
    model, _ = net()
    x = torch.randn(16, 32)
    expected = gradients(model, x)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="in a copy of the model that the plugin does not know"):
        identical(gradients(twin, x), expected, "deepcopy")
    assert twin.first.weight is not model.first.weight
    plain = Net()
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    loaded = net()[0]
    loaded.load_state_dict(plain.state_dict())
    identical(gradients(loaded, x), expected, "after load_state_dict")


def test_print_shows_the_casts():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False), Conv1D(4, 4))
    convert(model, "nvfp4", overrides={"1": LinearCasts(fprop_w=ONE_LEVEL)})
    lines = str(model).splitlines()
    assert lines[1].strip() == "(0): QuantLinear(in_features=4, out_features=8, bias=True, casts=nvfp4)"
    assert lines[2].strip() == (
        "(1): QuantLinear(in_features=8, out_features=4, bias=False, "
        "casts=fprop(x=hp, w=e2m1/e4m3:1x16) dgrad(g=hp, w=hp) wgrad(g=hp, x=hp))"
    )
    assert lines[3].strip() == "(2): QuantConv1D(casts=nvfp4)"
    set_phase(model, "bf16")
    assert "casts=bf16" in str(model[0])


def test_gradient_of_what_is_not_needed_is_not_computed():
    layer = layer_like(nn.Linear(IN, OUT), "nvfp4")
    layer.weight.requires_grad_(False)
    with spied() as seen:
        run(layer, torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT))
    assert list(seen) == ["fprop_x", "fprop_w", "dgrad_g", "dgrad_w"]
    with spied() as seen, torch.no_grad():
        layer(torch.randn(TOKENS, IN))
    assert list(seen) == ["fprop_x", "fprop_w"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("casts", "autocast", "blend"),
    [
        *((name, number % 2 == 0, None) for number, name in enumerate(["nvfp4", *EVERYTHING])),
        *(("ternary", autocast, 0.3) for autocast in (False, True)),
    ],
)
def test_torch_compile_gives_the_same_bits(casts, autocast, blend):
    x = torch.randn(16, 32)
    model, keys = net(EVERYTHING.get(casts, casts))
    set_blend(model, blend)
    compiled = torch.compile(model, fullgraph=True)
    for step in (1, 2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            keys.fill_(step)
            expected = gradients(model, x)
            keys.fill_(step)
            found = gradients(compiled, x)
        # db sums over the tokens in generated code, here as in a compiled nn.Linear, and adds in another order.
        for name in ("first.bias", "second.bias"):
            torch.testing.assert_close(found.pop(name), expected.pop(name), rtol=1e-5, atol=1e-8)
        identical(found, expected, f"compiled, step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("casts", ["nvfp4", "surrogates", "fp8-delayed"])
def test_a_phase_costs_one_compilation(compiler, casts):
    x = torch.randn(16, 32)
    model, keys = net(EVERYTHING.get(casts, casts))
    histories = AmaxHistories(model)
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    for phase, expected in (("fqt", 1), ("qaf", 2), ("fqt", 2), ("qaf", 2)):
        set_phase(model, phase)
        for step in range(3):
            keys.fill_(step)
            gradients(compiled, x)
            histories.advance_()
        assert compiler.frame_count == expected, f"{compiler.frame_count} compilations after the phase {phase}"


def test_one_graph_takes_any_number_of_rows(compiler):
    compiled = torch.compile(convert(nn.Linear(32, 16), "nvfp4"), backend=compiler, fullgraph=True)
    with torch.no_grad():
        for rows in (8, 9, 10, 11):
            compiled(torch.randn(rows, 32))
    assert compiler.frame_count == 2  # the second has found out that rows change


@pytest.mark.parametrize("casts", ["nvfp4", "ufp4"])
def test_wrong_width_is_refused(casts):
    """A rotation would pad 60 and 64 features to the same groups."""
    with pytest.raises(ValueError, match=r"Layer Quant\w+ .* takes 64 features; got \(4, 60\)"):
        layer_like(nn.Linear(IN, OUT), casts)(torch.randn(4, 60))
