"""The ``lowbit`` command with a tiny model and text."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_lowbit import cli

TINY = """
trainer: {max_steps: 6, log_every_n_steps: 1, val_check_interval: 3, default_root_dir: runs/tiny}
model: {init_args: {config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2},
                    scheduler: {init_args: {warmup_steps: 1}}}}
data: {init_args: {path: text, sequence_length: 16, batch_size: 2, val_batches: 2, val_fraction: 0.2}}
"""


def write_tiny():
    """Writes a tiny text and recipe into the current folder."""
    Path("text").mkdir()
    Path("text/a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    Path("tiny.yaml").write_text(TINY)


def lowbit(*arguments, recipes=("quickstart",), command="fit"):
    return cli.main([command, *(f"--config={name}" for name in (*recipes, "tiny.yaml")), *arguments])


def scalars(run, tag):
    """What a real TensorBoard event file of a run says."""
    events = EventAccumulator(str(run)).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


OPTIMIZER, SCHEDULER = (f"--model.init_args.{part}.init_args" for part in ("optimizer", "scheduler"))
