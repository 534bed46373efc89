"""A tiny text and recipe in the current folder of each test, whose runs are forks."""

from pathlib import Path

import pytest

from tests.launch import FORKS

TINY = """
trainer: {max_steps: 8, log_every_n_steps: 1, val_check_interval: 4}
model: {init_args: {config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2},
                    scheduler: {init_args: {warmup_steps: 1}}}}
data: {init_args: {path: text.txt, sequence_length: 16, batch_size: 2, val_batches: 2, val_fraction: 0.2}}
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_lowbit.cli.lab.compare.command.subprocess", FORKS)
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    Path("tiny.yaml").write_text(TINY)
