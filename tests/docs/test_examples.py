"""The recipe, callback and precision plugin of docs/examples work, and its scripts train in few bits; all are short."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_lowbit
from lightning_lowbit.cli import main
from lightning_lowbit.export.tokenizer import bytes_tokenizer
from lightning_lowbit.nn import QuantizedLayer, QuantLinear
from tests.lightning_imports import quiet_trainer
from tests.tables import each

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FILES = [EXAMPLES / name for name in ("digits.py", "digits.yaml", "hybrid_precision.py", "weight_noise.py")]


# By script: arguments of a run, what it prints, and between what the number in it lies.
SCRIPTS = {
    "digits_mlp": ([], r"FP4 +\d\.\d{3} +(\d\d\.\d)%", 85, 100),  # needs scikit-learn
    "transformer": (["--steps=60"], r"validation: (\d\.\d\d) nats .* 5\.55\ndef ", 1.5, 2.9),
    "unet": (["--steps=80"], r"mean squared error: 0\.2500 with noise, (0\.\d{4}) without", 0, 0.03),
    "gan": ([], r"dots of 8 that the generator hits: (\d); median distance \d\.\d{3}", 6, 8),
    "gpt2_finetuning": (
        ["--steps=2", "--text=text.txt", "--model=model", "--length=32", "--output=tuned"],
        r"loss before, in high precision: \d\.\d{3}; after, in 4 bits: (\d\.\d{3})\nThe",
        0,
        9,
    ),
}


@pytest.fixture
def examples(monkeypatch):
    """The folder as the first place for imports."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in (*SCRIPTS, *(file.stem for file in FILES)):
        monkeypatch.delitem(sys.modules, name, raising=False)


@each("file, most", [*((file, 39) for file in FILES), *((EXAMPLES / f"{name}.py", 79) for name in SCRIPTS)])
def test_it_is_short(file, most):
    assert len(file.read_text().splitlines()) <= most


def test_the_recipe_trains_with_the_callback(examples, monkeypatch):
    weight_noise = import_module("weight_noise")
    ended = []
    monkeypatch.setattr(weight_noise.WeightNoise, "teardown", lambda self, *_, **__: ended.append(self), raising=False)
    main(["fit", "--config", str(EXAMPLES / "digits.yaml")])
    (callback,) = ended
    assert list(callback.sqnr) == ["body"], "head is skipped"
    assert 15 < callback.report_data(None)["weight_sqnr"]["body"] < 25
    assert callback.report_alerts(None) == []
    callback.least = 30.0
    assert callback.report_alerts(None)[0].startswith("body: the weight has ")


def test_the_plugin_trains_with_the_casts_of_both_presets(examples):
    plugin = import_module("hybrid_precision").HybridPrecision()
    model = import_module("digits").Digits(lr=1e-2)
    before = model.body.weight.detach().clone()
    quiet_trainer(plugin, max_steps=3).fit(model)
    forward, backward = (lightning_lowbit.LinearCasts.preset(name) for name in ("mxfp8", "mxfp4"))
    assert isinstance(model.body, QuantLinear)
    assert model.body.casts.fprop_w == forward.fprop_w
    assert model.body.casts.wgrad_g == backward.wgrad_g
    assert not torch.equal(model.body.weight, before)


@pytest.fixture
def run(examples, tmp_path, capsys):
    """Runs a script in an empty folder with a text and a tiny GPT-2; returns what it printed."""
    Path("text.txt").write_text("user: Who are you?\nassistant: A small model.\n" * 1000)

    def call(name, arguments):
        if name == "gpt2_finetuning":
            sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 2}
            GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained("model")
            bytes_tokenizer().save_pretrained("model")
        import_module(name).main(arguments)
        return capsys.readouterr().out

    return call


@pytest.mark.fast("gpt2_finetuning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_trains_in_few_bits_and_prints_the_result(run, name):
    arguments, pattern, low, high = SCRIPTS[name]
    calls = []  # of layers with casts

    def note(module, *_):
        calls.append(isinstance(module, QuantizedLayer) and len(module.casts.quantized_gemms) > 0)

    with register_module_forward_hook(note):
        assert low <= float(re.search(pattern, run(name, arguments))[1]) <= high
    assert any(calls)
