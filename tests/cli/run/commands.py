"""The ``lowbit`` command with a tiny model and text."""

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_lowbit import cli

OPTIMIZER, SCHEDULER = (f"--model.init_args.{part}.init_args" for part in ("optimizer", "scheduler"))


def write_tiny(file=Path("tiny.yaml"), **trainer):
    """Writes what makes a recipe tiny, with arguments of the Trainer, and the text that it reads beside it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    content = {
        "trainer": {"max_steps": 6, "log_every_n_steps": 1, "val_check_interval": 3, **trainer},
        "model": {"init_args": {"config": sizes, "scheduler": {"init_args": {"warmup_steps": 1}}}},
        "data": {"init_args": {"path": "text.txt", "sequence_length": 16, "batch_size": 2, "val_batches": 2}},
    }
    content["data"]["init_args"]["val_fraction"] = 0.2
    file.write_text(json.dumps(content))
    file.with_name("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)


def lowbit(*arguments, recipes=("quickstart",), command="fit"):
    return cli.main([command, *(f"--config={name}" for name in (*recipes, "tiny.yaml")), *arguments])


def scalars(run, tag):
    """What a real TensorBoard event file of a run says."""
    events = EventAccumulator(str(run)).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}
