"""The scripts of docs/examples that users copy: each is short, trains quantized layers, and prints what it promises."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from torch.nn.modules.module import register_module_forward_hook
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_lowbit.export.tokenizer import bytes_tokenizer
from lightning_lowbit.nn import QuantizedLayer
from tests.tables import each

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
# By script: arguments of a tiny run, and the last lines that it prints.
SCRIPTS = {
    "digits_mlp": (["--epochs=1"], r"FP4 +\d\.\d{3} +\d\d\.\d%"),
    "transformer": (
        ["--steps=2", "--text=text.txt"],
        r"validation: [2-5]\.\d\d nats for a byte; chance has 5\.55\ndef ",
    ),
    "gpt2_finetuning": (
        ["--steps=2", "--text=text.txt", "--model=model", "--length=32", "--output=tuned"],
        r"loss before, in high precision: \d\.\d{3}; after, in 4 bits: \d\.\d{3}\nThe",
    ),
    "unet": (["--steps=2"], r"mean squared error: 0\.2500 with noise, 0\.\d{4} without"),
    "gan": (["--steps=2"], r"dots of 8 that the generator hits: \d; median distance \d\.\d{3}"),
}
SLOW = {"digits_mlp", "transformer", "unet"}  # digits_mlp needs scikit-learn, too


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs a script in an empty folder with a text and a tiny GPT-2; returns what it printed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("user: Who are you?\nassistant: A small model.\n" * 1000)

    def call(name, arguments):
        if name == "gpt2_finetuning":
            sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 2}
            GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained("model")
            bytes_tokenizer().save_pretrained("model")
        import_module(name).main(arguments)
        return capsys.readouterr().out

    yield call
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@each("name", SCRIPTS)
def test_it_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SCRIPTS])
def test_it_trains_in_few_bits_and_prints_the_result(run, name):
    arguments, pattern = SCRIPTS[name]
    calls = []  # of layers with casts

    def note(module, *_):
        calls.append(isinstance(module, QuantizedLayer) and len(module.casts.quantized_gemms) > 0)

    with register_module_forward_hook(note):
        assert re.search(pattern, run(name, arguments))
    assert any(calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "pattern", "low", "high"),
    [
        ("digits_mlp", [], r"FP4 +\d\.\d{3} +(\d\d\.\d)%", 85, 100),
        ("transformer", ["--steps=60"], r"validation: (\d\.\d\d) nats", 1.5, 2.9),
        ("unet", ["--steps=80"], r"noise, (0\.\d{4}) without", 0, 0.03),
        ("gan", [], r"hits: (\d)", 6, 8),
    ],
    ids=["digits_mlp", "transformer", "unet", "gan"],
)
def test_it_learns(run, name, arguments, pattern, low, high):
    assert low <= float(re.search(pattern, run(name, arguments))[1]) <= high
