"""The options of ``lowbit evaluate``, read without torch."""

import argparse
from collections.abc import Sequence

from lightning_lowbit.checks import integer, positive
from lightning_lowbit.cli.options import Parser, existing, output_file
from lightning_lowbit.packages import install_extra, is_installed

KINDS = "a checkpoint of a run (.ckpt), or a folder with a config.json, as `lowbit export` and save_pretrained write"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "lowbit evaluate",
        "runs/quickstart/version_0/checkpoints/last.ckpt --tasks wikitext",
        description="Evaluates a model on tasks of lm-evaluation-harness: a checkpoint with the casts of its training, "
        "or a folder that `lowbit export` or save_pretrained wrote, as transformers computes it.",
    )
    add = parser.add_argument
    add("model", metavar="CHECKPOINT|FOLDER", help="a checkpoint of a run, or a folder with a config.json")
    add("--tasks", required=True, action="append", metavar="A,B", help="names, or patterns such as 'mmlu_*' (repeat)")
    folder = "a folder of your own tasks in YAML, or one such file (repeat)"
    add("--include_path", action="append", default=[], metavar="FOLDER", help=folder)
    add("--num_fewshot", type=int, metavar="N", help="examples in front of each question; the task's number by default")
    add("--limit", type=float, metavar="N", help="documents of each task, or a share of them below 1; all by default")
    add("--batch_size", default="1", metavar="N", help="requests at once, or auto; 1 by default")
    add("--max_length", type=int, metavar="N", help="tokens of a request; what the model can take by default")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1, ...; an accelerator by default, where there is one")
    tokenizer = (
        "bytes, or a name or folder for AutoTokenizer; that of the checkpoint's data, or of the folder, by default"
    )
    add("--tokenizer", metavar="NAME", help=tokenizer)
    add("--module", metavar="CLASS", help="package.module.Class that was trained, for checkpoints not of a recipe")
    add("--output", metavar="FILE.json", help="the results; <model>_evaluation.json in the current folder by default")
    options = parser.parse_args(arguments)
    limit, size = options.limit, options.batch_size
    if limit is not None and positive("--limit", limit, "a number of documents") > 1 and not limit.is_integer():
        raise ValueError(f"--limit is a whole number of documents, or a share below 1; got {limit}.")
    if size != "auto":
        number = int(size) if size.isdecimal() else size
        options.batch_size = integer("--batch_size", number, 1, "auto or a number of requests")
    if options.num_fewshot is not None:
        integer("--num_fewshot", options.num_fewshot, 0, "a number of examples")
    if options.max_length is not None:
        integer("--max_length", options.max_length, 1, "a number of tokens")
    options.output = output_file(options.output, options.model, "_evaluation.json", "file such as results.json")
    options.model = existing(options.model, KINDS)
    if not is_installed("lm_eval"):
        raise ValueError(f"lowbit evaluate takes lm-evaluation-harness: {install_extra('lm_eval')}.")
    return options
