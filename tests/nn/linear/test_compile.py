"""Layers under ``torch.compile``, and inputs of another width."""

import pytest
import torch
from torch import nn

from lightning_lowbit import convert
from lightning_lowbit.nn import AmaxHistories, set_blend, set_phase
from tests.nn.layers import gradients, identical, layer_like, net
from tests.nn.linear.casts import EVERYTHING, IN, OUT


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
    with pytest.raises(ValueError, match=r"The layer takes 64 features; got \(4, 60\)"):
        layer_like(nn.Linear(IN, OUT), casts)(torch.randn(4, 60))
