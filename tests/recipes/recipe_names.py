"""Names of all recipes, overlays and studies, and what the command makes of them."""

import json
from pathlib import Path

import yaml
from lightning.pytorch import Callback
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_lowbit import cli
from lightning_lowbit.cli import run
from lightning_lowbit.cli.configs import OVERLAY, STUDY, kind, merge_configs, recipes

RECIPES, OVERLAYS, STUDIES = (
    [name for name, path in recipes().items() if kind(path) == mark] for mark in ("", OVERLAY, STUDY)
)

# The rules of Stable-SPAM's table 4.6, for elements and for norms, beside resets of the moments.
RULES = {
    "moret": (None, None),
    "moret_adaclip": ("ada_clip", None),
    "moret_adagn": (None, "ada_gn"),
    "stable_spam": ("ada_clip", "ada_gn"),
    "moret_adagn_spikeclip": ("spike_clip", "ada_gn"),
    "moret_gradclip_adaclip": ("ada_clip", "grad_clip"),
}


class Logged(Callback):
    """What was logged in each batch."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *_):
        self.steps.append({name: value.item() for name, value in trainer.callback_metrics.items()})


class Idle(run.LowBitCLI):
    """Makes all parts of a run, and does not run."""

    def _run_subcommand(self, subcommand):
        pass


def parts(*names):
    """Those that ``lowbit fit`` makes of configurations, as attributes."""
    arguments = ["fit", *(f"--config={name}" for name in names), "--trainer.accelerator=cpu"]
    return run._make(Idle, merge_configs(arguments, Path("merged.yaml").absolute()))


SMALL = """
trainer: {max_steps: 2, accumulate_grad_batches: 1, log_every_n_steps: 1, val_check_interval: 1}
model: {init_args: {config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2},
                    scheduler: {init_args: {warmup_steps: 1}}}}
data: {init_args: {path: PATH, tokenizer: bytes, sequence_length: 16, batch_size: 2, val_batches: 2}}
"""


def write_small(path="text.txt"):
    """Writes a text, and a recipe of two steps over it or other data."""
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    Path("small.yaml").write_text(SMALL.replace("PATH", path))


def run_json(*configs, options=()):
    """What the page of a run says that ``lowbit fit`` makes of configurations."""
    assert cli.main(["fit", *(f"--config={config}" for config in configs), *options]) == 0
    (path,) = Path("runs").rglob("run.json")
    return json.loads(path.read_text())


def save_pretrained(folder, network="llama"):
    """A model of the small size, as `transformers` saves them."""
    sizes = yaml.safe_load(SMALL)["model"]["init_args"]["config"]
    fixed = {"vocab_size": 256, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(network, **fixed, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model
