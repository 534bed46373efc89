"""Layers compute the same bits by every implementation of casts."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from lightning_lowbit import convert
from lightning_lowbit.compilation import backend
from lightning_lowbit.nn import PRESETS, AmaxHistories, LayerKeys

ROOT = Path(__file__).parents[2]


def results(casts, name):
    """Output, gradients and staged amaxes of a layer in the casts of a preset, by one implementation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 48))
    x = torch.randn(40, 70, requires_grad=True)
    LayerKeys(convert(model, casts)).fill_(0)
    histories = AmaxHistories(model)
    histories.to_(torch.device("cpu"))
    with backend(name):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
    return y.detach(), x.grad, *(parameter.grad for parameter in model.parameters()), *histories.staged


def compare(name):
    for casts in PRESETS:
        for found, expected in zip(results(casts, name), results(casts, "eager"), strict=True):
            assert torch.equal(found, expected), f"{casts} by {name}"


def test_cpp():
    compare("cpp")


@pytest.mark.slow
def test_triton_in_its_interpreter():
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", "from tests.kernels.test_layers import compare; compare('triton')"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_a_compiled_model_calls_the_kernels():
    """In one graph, and with the bits of eager code."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 16))
    convert(model, "mxfp8")
    x = torch.randn(32, 64)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)


def test_tensors_without_memory_take_plain_code():
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(64, 48))
        convert(model, "mxfp8")
        assert model(torch.randn(32, 64)).shape == (32, 48)
