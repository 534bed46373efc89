"""Models that are evaluated, and tasks."""

import json

import torch

from lightning_lowbit import LowBitPrecision
from lightning_lowbit.recipes.data import TextDataModule
from lightning_lowbit.recipes.models import CausalLM
from tests.lightning_imports import quiet_trainer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n"


def train(module, file, data=None, casts="int4", skip=()):
    """A checkpoint of a module that was trained for a few steps."""
    trainer = quiet_trainer(LowBitPrecision(casts, skip=skip), max_steps=4, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(file, weights_only=False)
    return file


def language_model(casts, folder, tokenizer="bytes"):
    """A checkpoint of a small language model on text."""
    (folder / "text.txt").write_text(TEXT * 80)
    data = TextDataModule(str(folder / "text.txt"), tokenizer=tokenizer, sequence_length=32, batch_size=4)
    config = {**SIZES, "max_position_embeddings": 64}
    return train(CausalLM(config=config, optimizer=big_steps), folder / "last.ckpt", data, casts, skip=["lm_head"])


def big_steps(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


QUESTIONS = [
    {"start": "def f(", "ends": ["x):", "~~~~"], "answer": 0},
    {"start": "    return", "ends": ["zzz", " x + 1"], "answer": 1},
    {"start": "class", "ends": [" A:\n    pass", " \n\n\n"], "answer": 0},
]
TEXTS = [TEXT[:40], "x", "é = 1\n"]


def task(kind, metric, start, end, **others):
    """A task of the harness, in an order of its keys that the harness does not care for."""
    aggregated = {"metric": metric, "aggregation": others.pop("by", metric), "higher_is_better": metric == "acc"}
    return {
        "dataset_path": "json",
        "test_split": "test",
        "target_delimiter": "",
        "output_type": kind,
        "doc_to_text": start,
        "doc_to_target": end,
        "metric_list": [aggregated],
        **others,
    }


TASKS = {  # the first has a number of examples that --num_fewshot does not change
    "own_choice": task(
        "multiple_choice", "acc", "{{start}}", "{{answer}}", doc_to_choice="{{ends}}", by="mean", num_fewshot=0
    ),
    "own_ending": task("loglikelihood", "perplexity", "{{start}}", "{{ends[answer]}}"),
    "own_text": task("loglikelihood_rolling", "bits_per_byte", "", "{{text}}"),
}


def write_tasks(folder):
    """Task files, whose data lies beside them; JSON is YAML."""
    rows = {"questions": QUESTIONS, "texts": [{"text": text} for text in TEXTS]}
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    for name, content in TASKS.items():
        data = str(folder / ("texts.jsonl" if name == "own_text" else "questions.jsonl"))
        own = {"task": name, **content, "dataset_kwargs": {"data_files": {"test": data}}}
        (folder / f"{name}.yaml").write_text(json.dumps(own))
