"""Scores of lm-evaluation-harness, held against the model's own logits."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from lightning_lowbit import cli
from lightning_lowbit.cli.evaluate.command import find_tasks, harness_model, load
from lightning_lowbit.export.tokenizer import bytes_tokenizer
from lightning_lowbit.export.trained_model import read
from tests.cli.evaluate.models import QUESTIONS, TEXTS, language_model, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the harness and what it imports
CASTS = ("bf16", "nvfp4", "int4")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {casts: language_model(casts, tmp_path_factory.mktemp(casts)) for casts in CASTS}


@pytest.fixture(autouse=True)
def tasks(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks")
    return tmp_path / "tasks"


def evaluate(path, tasks, *options, names="own_choice,own_ending,own_text"):
    """The metrics of each task, and all that was written."""
    arguments = ["evaluate", path, "--tasks", names, "--include_path", tasks, "--output", "results.json", *options]
    assert cli.main([*map(str, arguments)]) == 0
    written = json.loads(Path("results.json").read_text())
    return {metric: value for row in written["results"].values() for metric, value in row.items()}, written


def log_likelihood(model, start, end):
    """By the model's own logits: of the bytes of ``end`` after those of ``start``."""
    tokens = torch.tensor([[*start, *end]])
    with torch.no_grad():
        scores = model(tokens[:, :-1]).logits[0].float().log_softmax(-1)
    return float(scores[-len(end) :].gather(1, torch.tensor([*end])[:, None]).sum())


@pytest.mark.parametrize("casts", CASTS)
def test_scores_are_those_of_the_logits(casts, checkpoints, tasks, capsys):
    scores, written = evaluate(checkpoints[casts], tasks)
    model = read(checkpoints[casts], in_few_bits=False).model
    rows = [
        (row["answer"], [log_likelihood(model, row["start"].encode(), end.encode()) for end in row["ends"]])
        for row in QUESTIONS
    ]
    right = [ends[answer] for answer, ends in rows]
    assert scores["acc,none"] == sum(ends[answer] == max(ends) for answer, ends in rows) / len(rows)
    assert -math.log(scores["perplexity,none"]) == pytest.approx(sum(right) / len(right), rel=1e-6)
    total = sum(log_likelihood(model, [0], text.encode()) for text in TEXTS)  # behind a separator
    size = sum(len(text.encode()) for text in TEXTS)
    assert scores["bits_per_byte,none"] == pytest.approx(-total / size / math.log(2), rel=1e-6)
    shown = capsys.readouterr().out
    assert f"{checkpoints[casts]}: as trained until step 4: {casts}" in shown and "|own_ending|" in shown
    assert written["model"]["tokenizer"] == "bytes"


def test_a_folder_in_bf16_agrees_with_its_checkpoint(checkpoints, tasks, tmp_path):
    read(checkpoints["bf16"], in_few_bits=False).model.bfloat16().save_pretrained(tmp_path / "folder")
    bytes_tokenizer().save_pretrained(tmp_path / "folder")
    trained, _ = evaluate(checkpoints["bf16"], tasks)
    exported, written = evaluate(tmp_path / "folder", tasks)
    assert written["model"]["dtype"] == "bfloat16"
    assert exported["acc,none"] == trained["acc,none"]
    assert exported["bits_per_byte,none"] == pytest.approx(trained["bits_per_byte,none"], abs=5e-3)
    assert math.log(exported["perplexity,none"]) == pytest.approx(math.log(trained["perplexity,none"]), abs=5e-2)


def test_the_task_of_the_guide_runs(checkpoints, tmp_path):
    (tmp_path / "own").mkdir()
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "evaluation.md").read_text()
    (tmp_path / "own" / "task.yaml").write_text(re.search("```yaml\n(.*?)```", guide, re.DOTALL)[1])
    Path("questions.jsonl").write_text(re.search(r"`({.*})` in `questions.jsonl`", guide)[1])
    scores, _ = evaluate(checkpoints["int4"], tmp_path / "own", names="own_questions")
    assert scores["acc,none"] in (0, 1)


def test_options_reach_the_harness(checkpoints, tasks, capsys):
    options = ("--limit", 2, "--num_fewshot", 1, "--max_length", 16, "--batch_size", 2, "--device", "cpu")
    _, written = evaluate(checkpoints["int4"], tasks, *options, names="own_ending, own_choice,own_te*")
    assert written["n-samples"]["own_text"] == {"original": 3, "effective": 2}
    assert written["n-shot"] == {"own_choice": 0, "own_ending": 1, "own_text": 1}
    assert "Without --num_fewshot 1: own_choice, which fix their number" in capsys.readouterr().out
    assert written["max_length"] == 16
    assert (written["config"]["batch_size"], written["config"]["device"]) == (2, "cpu")


def test_requests_longer_than_the_positions_of_a_model_are_refused(checkpoints):
    model = load(checkpoints["nvfp4"], None, None, torch.device("cpu"))
    assert harness_model(model, max_length=64).max_length == 64
    with pytest.raises(ValueError, match="--max_length 65 is more than the 64 positions of the model"):
        harness_model(model, max_length=65)


def test_generation_ends_with_the_tokens_asked_for(checkpoints):
    from lm_eval.api.instance import Instance

    model = harness_model(load(checkpoints["nvfp4"], None, None, torch.device("cpu")))
    settings = {"until": ["\0"], "max_gen_toks": 5}
    (text,) = model.generate_until([Instance("generate_until", {}, ("def f(", settings), 0)])
    assert 0 < len(text) <= 5


def test_unknown_tasks_name_the_nearest(tasks):
    with pytest.raises(ValueError, match=r"no task 'helaswag'. Did you mean 'hellaswag'.*`lm_eval ls tasks` lists all"):
        find_tasks(["own_text,helaswag"], [str(tasks)])
    with pytest.raises(FileNotFoundError, match="no nowhere. Give a folder of tasks, or a task's file, as --include_p"):
        find_tasks(["own_text"], ["nowhere"])
    names, _ = find_tasks(["own_*"], [str(tasks / "own_text.yaml")])
    assert names == ["own_choice", "own_ending", "own_text"]
