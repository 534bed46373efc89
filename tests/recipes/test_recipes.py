"""Every recipe and overlay: two steps of a small version, and its full size without memory for the numbers."""

import gzip
import json
from pathlib import Path

import pytest
import torch
import yaml

from lightning_lowbit import cli
from lightning_lowbit.cli import run
from lightning_lowbit.cli.configs import OVERLAY, headline, recipes
from lightning_lowbit.nn import LinearCasts
from lightning_lowbit.precision import LowBitPrecision

OVERLAYS = [name for name, path in recipes().items() if headline(path).startswith(OVERLAY)]
RECIPES = [name for name in recipes() if name not in OVERLAYS]

# Millions of parameters.
SIZES = {
    "quickstart": 3.34,
    "c4": 58.07,
    "llama_130m": 134.11,
    "llama_350m": 367.97,
    "llama_1b": 1339,
    "llama_7b": 6738,
}

SMALL = """
trainer: {max_steps: 2, accumulate_grad_batches: 1, log_every_n_steps: 1, val_check_interval: 1}
model: {init_args: {config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2},
                    scheduler: {init_args: {warmup_steps: 1}}}}
data: {init_args: {path: PATH, tokenizer: bytes, sequence_length: 16, batch_size: 2, val_batches: 2}}
"""


def combinations():
    """(name, configurations) of each recipe alone and each overlay on a recipe that it suits."""
    yield from ((name, [name]) for name in RECIPES)
    yield from ((name, ["c4" if name.startswith("llama") else "quickstart", name]) for name in OVERLAYS)


COMBINATIONS = dict(combinations())


def write_c4(folder):
    """A folder in the shape of C4 on the Hub: gzipped JSON lines, with a card that names the parts."""
    (folder / "en").mkdir(parents=True)
    for part, rows in (("train.00000-of-00002", 6), ("train.00001-of-00002", 6), ("validation.00000-of-00001", 4)):
        with gzip.open(folder / "en" / f"c4-{part}.json.gz", "wt") as file:
            for number in range(rows):
                text = f"{part} document {number}. " * 20
                file.write(json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://x"}) + "\n")
    files = [{"split": split, "path": f"en/c4-{split}.*.json.gz"} for split in ("train", "validation")]
    card = yaml.safe_dump({"configs": [{"config_name": "en", "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{card}---\n")


@pytest.mark.parametrize("name", COMBINATIONS)
def test_two_steps(name):
    configs = COMBINATIONS[name]
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    if "c4" in configs:
        write_c4(Path("c4"))
    Path("small.yaml").write_text(SMALL.replace("PATH", "hf:./c4:en" if "c4" in configs else "text.txt"))
    assert cli.main(["fit", *(f"--config={config}" for config in [*configs, "small.yaml"])]) == 0
    folder = Path("runs") / "+".join([*configs, "small"]) / "version_0"
    result = json.loads((folder / "run.json").read_text())
    assert result["status"] == "finished" and result["steps"] == 2
    assert (folder / "report.html").exists() and (folder / "checkpoints").exists()
    assert 0 < result["metrics"]["val_loss"] < 11


@pytest.mark.parametrize("name", COMBINATIONS)
def test_full_size(name, monkeypatch):
    made = []
    monkeypatch.setattr(run.LowBitCLI, "_run_subcommand", lambda self, subcommand: made.append(self))
    with torch.device("meta"):
        run.run(["fit", *(f"--config={config}" for config in COMBINATIONS[name]), "--trainer.accelerator=cpu"])
        (parsed,) = made
        optimizer = parsed.model.make_optimizer(parsed.model.parameters())
    assert all(parameter.is_meta for parameter in parsed.model.parameters())
    size = sum(parameter.numel() for parameter in parsed.model.parameters()) / 1e6
    assert size == pytest.approx(SIZES.get(name, SIZES["quickstart"]), rel=0.01)
    plugin = parsed.trainer.precision_plugin
    assert isinstance(plugin, LowBitPrecision)
    casts = LinearCasts() if name == "bf16" else LinearCasts.preset("nvfp4")
    planned = plugin.plan(parsed.model)
    assert len(planned) == 7 * parsed.model.model.config.num_hidden_layers and set(planned.values()) == {casts}
    assert type(optimizer).__name__ == ("AdamW" if name == "adamw" else "StableSPAM")
    assert not Path("runs").exists()


def test_every_overlay_and_recipe_is_told_apart():
    assert set(RECIPES) == {"quickstart", "c4"}
    assert {"bf16", "nvfp4", "qaf", "adamw", "stable_spam", "llama_130m", "llama_1b"} <= set(OVERLAYS)


def test_the_readme_lists_them_all():
    page = Path(__file__).parent.parent.parent / "recipes" / "README.md"
    for name in recipes():
        assert f"`{name}`" in page.read_text(), f"recipes/README.md does not list {name}"
