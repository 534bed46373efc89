"""Adapters of PEFT that are merged and brought to few bits by one export."""

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_lowbit import LinearCasts, LowBitPrecision, export_checkpoint, pack_frozen
from lightning_lowbit.cli import main
from lightning_lowbit.cli.evaluate import command
from lightning_lowbit.export.checkpoint import explain_formats
from lightning_lowbit.export.formats.table import FORMATS
from lightning_lowbit.export.merging import merge_adapters
from lightning_lowbit.export.tokenizer import bytes_tokenizer
from lightning_lowbit.export.trained_model import TrainedModel, read
from lightning_lowbit.nn.layers.layer import quantized_layers
from lightning_lowbit.recipes.models import CausalLM
from lightning_lowbit.recipes.tuning.adapters import LoRACausalLM
from tests.export.originals import TEXT, fit
from tests.tables import each

peft = pytest.importorskip("peft")
# PEFT reads a name that transformers has renamed.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 256}
INT4 = {"fprop_w": {"element": "int4", "scale": {"format": "fp32", "block": "row"}}, "dgrad_w": "fprop"}
LORA = "lightning_lowbit.recipes.tuning.adapters.LoRACausalLM"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of a model that knows the text."""
    folder = tmp_path_factory.mktemp("base")
    model = CausalLM(
        "llama", {"max_position_embeddings": 128, **SIZES}, seed=0, optimizer=partial(torch.optim.AdamW, lr=3e-3)
    )
    fit(model, LowBitPrecision("bf16"), folder, 30)
    model.model.save_pretrained(folder / "model", latent=True)
    return folder / "model"


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """A function that trains adapters on the base in some casts, and returns the checkpoint's path."""

    @cache
    def train(casts):
        kept = {"nvfp4": "nvfp4-nvidia", "int4": INT4, "bf16": None}[casts]
        model = LoRACausalLM(str(base), kept, rank=4, optimizer=partial(torch.optim.AdamW, lr=1e-2))
        precision = LowBitPrecision(kept or "bf16", skip=["lm_head", "lora_A", "lora_B"])
        return fit(model, precision, tmp_path_factory.mktemp(casts), 10)

    return train


CASES = [
    ("nvfp4", "nvfp4-w4a16", "e2m1/e4m3"),
    ("nvfp4", "int4", "int4/bf16:1x32"),
    ("nvfp4", "mxfp8", "e4m3/e8m0:1x32"),
    ("nvfp4", "gguf", "e2m1/e4m3"),
    ("nvfp4", "onnx", "e2m1/e4m3"),
    ("nvfp4", "dequantized", "e2m1/e4m3"),
    ("int4", "int4", "int4/bf16:row"),
    ("int4", "gguf", "int4/fp16:row"),
    ("bf16", "int8", "int8/bf16:1x32"),
    ("bf16", "fp8", "e4m3/fp32:row"),
    ("bf16", "gguf", "int4/fp16:1x32"),
]


@each(("casts", "format", "cast"), CASES)
def test_one_export_merges_and_rounds(adapted, tmp_path, casts, format, cast):
    folder = tmp_path / f"{casts}-{format}"
    exported = export_checkpoint(adapted(casts), format, folder, merge=True, module=LORA)
    assert {row.cast[: len(cast)] for row in exported.rows} == {cast}
    assert all(row.error > 0 for row in exported.rows) and len(exported.rows) == 14
    assert not any(".base_layer" in row.name or "lora" in row.name for row in exported.rows)
    assert "merged: LORA r=4 lora_alpha=32" in (folder / "README.md").read_text()
    if exported.parity is not None:
        assert exported.parity.merged is not None and 0 < exported.parity.merged < 0.5
        assert "from unmerged adapters" in str(exported.parity)
        assert abs(exported.parity.exported - exported.parity.trained) < 0.1
    assert (folder / "tokenizer.json").exists() == (format != "gguf")


def test_the_sum_is_that_of_the_training(adapted, tmp_path):
    """In a format that rounds little, the merged model is the unmerged one without its adapters."""
    exported = export_checkpoint(adapted("bf16"), "int8", tmp_path / "out", dtype="fp32", merge=True, module=LORA)
    assert exported.parity.merged < 0.03
    original = read(adapted("bf16"), LORA)
    model = original.model
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors
    [row] = [row for row in exported.rows if row.name == "model.layers.0.mlp.up_proj"]
    assert row.error <= float(expected.detach().abs().max()) / 127


def merged(adapters, format, dtype, casts, **options):
    """A network in packed casts with adapters, and the same as a trained model that is merged for a format."""
    torch.manual_seed(0)
    network = LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False)
    if casts is not None:
        pack_frozen(network, weights_alone(casts), skip=["lm_head"], **options)
    model = peft.get_peft_model(network, peft.LoraConfig(r=4, init_lora_weights=False, **adapters)).eval()
    layers = {name: layer for name, layer in quantized_layers(model).items() if layer.casts.fprop_w is not None}
    original = TrainedModel(model, layers, torch.float32, network.config)
    return model, merge_adapters(original, FORMATS[format], dtype)


def weights_alone(preset):
    return LinearCasts.preset(preset).replace(fprop_x=None, wgrad_x=None)


@each(
    ("adapters", "base"),
    [
        ({"target_modules": "all-linear"}, "nvfp4-nvidia"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, "nvfp4-nvidia"),
        ({"target_modules": "all-linear", "use_rslora": True}, "int4"),
        ({"target_modules": ["q_proj", "up_proj"], "use_dora": True}, None),
        ({"target_modules": ["lm_head", "q_proj"]}, None),
    ],
)
def test_merged_weights_compute_what_adapters_beside_them_do(adapters, base):
    model, original = merged(adapters, "int8", torch.float32, base)
    assert len(original.layers) == 14 and "lm_head" not in original.layers
    tokens = torch.randint(256, (2, 16))
    with torch.no_grad():
        expected, found = model(input_ids=tokens).logits, original.model(input_ids=tokens).logits
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_each_layer_keeps_the_cast_of_its_base():
    overrides = {"down_proj": weights_alone("int8")}
    _, original = merged({"target_modules": "all-linear"}, "gguf", torch.bfloat16, "int4", overrides=overrides)
    elements = {name.rpartition(".")[2]: layer.casts.fprop_w.element for name, layer in original.layers.items()}
    assert elements["down_proj"] == "int8" and {*elements.values()} == {"int4", "int8"}


def test_adapters_are_refused_by_the_name_of_the_flag(adapted, tmp_path):
    for format, merge, why in (
        ("nvfp4-w4a16", False, r"has adapters.*Give merge \(--merge\)"),
        ("bitnet", True, "bitnet has no cast for merged weights here"),
        ("nvfp4-w4a4", True, "nvfp4-w4a4 has no cast .* take nvfp4-w4a16"),
    ):
        with pytest.raises(ValueError, match=why):
            export_checkpoint(adapted("nvfp4"), format, tmp_path / "out", merge=merge, module=LORA)
    assert not [*tmp_path.iterdir()]
    told = explain_formats(read(adapted("nvfp4"), LORA))
    assert "--merge adds them" in told and "nvfp4-w4a16" in told and "gguf" in told and "bitnet" not in told


def test_adapters_are_evaluated_beside_their_base(adapted):
    evaluated = command.load(adapted("nvfp4"), None, LORA, torch.device("cpu"))
    assert hasattr(evaluated.model, "peft_config") and "nvfp4-nvidia in 14 layers" in evaluated.about


def test_a_model_without_adapters_has_none_to_merge(trained, tmp_path):
    with pytest.raises(ValueError, match="has no adapters to merge"):
        export_checkpoint(trained("llama", "mxfp8", steps=2), "mxfp8", tmp_path / "out", merge=True)


def test_the_commands_of_the_guide(base):
    """A run of the recipe tells its class: nothing but the checkpoint is given."""
    bytes_tokenizer().save_pretrained(base)
    Path("text.txt").write_text(TEXT)
    settings = {
        "model.init_args.network": base,
        "data.init_args.tokenizer": base,
        "data.init_args.path": "text.txt",
        "data.init_args.sequence_length": 32,
        "data.init_args.val_fraction": 0.3,
        "trainer.max_steps": 2,
        "trainer.val_check_interval": 2,
    }
    assert main(["fit", "--config=lora", *(f"--{name}={value}" for name, value in settings.items())]) == 0
    run = "runs/lora/version_0/checkpoints/last.ckpt"
    assert main(["export", run, "--merge", "--format=nvfp4-w4a16", "--output=merged"]) == 0
    tokenizer = AutoTokenizer.from_pretrained("merged")
    model = AutoModelForCausalLM.from_pretrained("merged", dtype="auto")
    inputs = tokenizer("for number", return_tensors="pt")
    assert len(model.generate(**inputs, max_new_tokens=4, do_sample=False)[0]) > inputs["input_ids"].shape[1]
