"""The record of a study: what is kept of runs, and that everything is drawn again from it."""

import json
import re
from math import inf, nan
from pathlib import Path

import pytest

from lightning_lowbit import cli
from lightning_lowbit.cli.lab.compare.claims import read_effects
from lightning_lowbit.cli.lab.compare.losses import RATIO, history, metric, reduced
from lightning_lowbit.cli.lab.compare.record import Record, markdown, read_record, write_comparison
from tests.tables import each


@pytest.fixture
def no_pictures(monkeypatch):
    """They take most of the time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())


def run_json(loss, steps=400):
    """What RunReport writes, with a measured ratio and a switch."""
    return {
        "steps": steps,
        "begin": 0,
        "status": "finished",
        "seconds": 12.3456789,
        "peak_memory_bytes": 3 * 2**29,
        "metrics": {"val_loss": loss, "val_perplexity": 7.123456789123, "loss": 1.0, "tokens/s": 1.0},
        "validation_metrics": ["val_loss", "val_perplexity"],
        "history": {
            "val_loss": [[step, loss + 1 / step] if loss else [step, None] for step in range(100, steps + 1, 100)],
            RATIO: [[step, 9 / step] for step in range(10, steps + 1, 10)],
            "loss": [[step, None if step == 200 else 2.0] for step in range(10, steps + 1, 10)],
            "tokens/s": [[10, 100.0], [20, 300.0], [30, 200.0]],
        },
        "summary": {"average_bits": 7.12, "gradient_noise": {"threshold": 3**0.5}, "layers": [{"name": "a"}] * 99}
        | {"compute_dtype": "float32"},
        "phases": [[0, 300, "fqt"], [300, steps, "qaf"]],
        "environment": {"started": "2026-11-23 16:26:19+00:00", "command": "/home/me/fit", "threads": 1}
        | {"torch": "2.13"},
    }


def record(name="mine"):
    report = "fp4/seed_0/report.html"
    runs = {
        "bf16": {seed: reduced(run_json(2.0 + seed / 30)) for seed in (0, 1)},
        "fp4": {0: reduced(run_json(2.1), report), 1: reduced(run_json(2.2))},
        "wild": {0: reduced(run_json(None))},
    }
    given = {"fp4": [{"expected": "+3.21234%", "source": "<a> | é"}, {"against": "wild", "expected": "lower"}]}
    effects = read_effects(given, [*runs], "bf16", "")
    return Record(name, "bf16", "lowbit compare --study mine", False, dict.fromkeys(runs, [0, 1]), effects, runs)


def test_what_is_drawn_from_the_file_is_what_was_drawn_from_the_runs(capsys):
    first, again = Path("first"), Path("again")
    for folder in (first, again):
        (folder / "fp4/seed_0").mkdir(parents=True)
        (folder / "fp4/seed_0/report.html").touch()
    record().write(first)
    assert read_record(first / "mine.json").effects == record().effects, "digits were lost"
    assert cli.main(["compare", "--from=first/mine.json", "--output=again"]) == 0
    before, after = ({p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} for folder in (first, again))
    assert before == after and {Path(name).suffix for name in before} == {".md", ".html", ".json", ".png"}
    assert b'href="fp4/seed_0/report.html"' in before["mine.html"]
    assert "| fp4 against bf16 | +3.21%" in capsys.readouterr().out
    assert "mine_noise.png" in before, "the ratio was lost"


@pytest.mark.usefixtures("no_pictures")
def test_a_comparison_without_a_name_is_drawn_beside_the_file_and_without_links_that_lead_nowhere():
    Path("first").mkdir()
    record(None).write(Path("first"))
    first = {path.name: path.read_bytes() for path in Path("first").iterdir()}
    assert set(first) == {"table.md", "study.html", "study.json", "loss.png", "gap.png", "noise.png"}
    Path("there").mkdir()
    Path("first/study.json").rename("there/study.json")
    assert cli.main(["compare", "--from=there/study.json"]) == 0
    assert {path.name: path.read_bytes() for path in Path("there").iterdir()} == first
    assert "href" not in Path("there/study.html").read_text()


def test_what_is_kept_of_a_run():
    run = reduced(run_json(2.0685591697692))
    assert (run.spikes, run.tokens_per_second, run.noise_threshold) == (1, 200.0, 3**0.5)
    assert run.metrics == {"val_loss": 2.06855917, "val_perplexity": 7.12345679}
    assert run.history["val_loss"][0] == (100, 2.07856) and len(run.history[RATIO]) == 40
    assert run.phases == [(0, 300, "fqt"), (300, 400, "qaf")]
    assert run.machine == {"threads": 1, "torch": "2.13", "compute_dtype": "float32", "date": "2026-11-23"}
    assert "layers" not in record().as_json() and "/home/me" not in record().as_json()
    for value in (None, nan, inf):  # stays not finite
        run = reduced(run_json(2.0) | {"metrics": {"val_loss": value}, "history": {"val_loss": [[1, value]]}})
        assert metric(run, "val_loss") != metric(run, "val_loss") and history(run, "val_loss")[0][1] != 0
        assert metric(run, "val_perplexity") is None


@pytest.mark.usefixtures("no_pictures")
def test_a_run_without_a_loss_in_validation_is_said_to_have_none():
    run = run_json(2.0)
    del run["metrics"]["val_loss"], run["history"]["val_loss"]
    table = write_comparison({"bf16": {0: reduced(run_json(2.0))}, "fp4": {0: reduced(run)}, "fp8": {}}, "bf16", Path())
    assert "No val_loss was logged in fp4: log it in validation_step" in table


def test_spikes_of_a_loss_of_another_name_are_not_said_to_be_none():
    run = run_json(2.0)
    run["history"]["train_loss"] = run["history"].pop("loss")
    results = {"bf16": {0: reduced(run)}}
    assert "None" not in markdown(results, "bf16") and reduced(run).spikes is None
    content = Record(None, "bf16", "", False, {"bf16": [0]}, (), results).as_json()
    Path("mine.json").write_text(content)
    assert read_record(Path("mine.json")).results["bf16"][0].spikes is None


def test_long_histories_are_thinned_to_the_same_steps_and_keep_the_last():
    run = run_json(2.0, 9990)
    whole = reduced(run).history[RATIO]
    assert 100 <= len(whole) <= 200 and whole[-1] == (9990, pytest.approx(9 / 9990, rel=1e-5))
    run["history"][RATIO] = run["history"][RATIO][-300:]  # of one that began later
    part = reduced(run).history[RATIO]
    assert len(part) > 100 and {step for step, _ in whole if step >= part[0][0]} <= {step for step, _ in part}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--from=none.json"], "There is no none.json. Give the STUDY.json that `lowbit compare` wrote."),
        (["--from=table.md"], "no record of a study, which `lowbit compare` writes as <study>.json"),
        (["--from=other.json"], "no record of a study"),
        (["--from=newer.json"], "a record of version 2, and this lightning_lowbit reads 1. Install the version"),
        (["--from=mine.json", "--study=qat", "--seeds=1"], "takes --output alone: leave out --study and --seeds."),
        (["--from=mine.json", "--config=quickstart"], "leave out --config."),
        (["--from=mine.json", "--jobs=2", "--pilot"], "leave out --jobs and --pilot."),
        (["--from=mine.json", "--trainer.max_steps=3"], "leave out --trainer.max_steps=3."),
    ],
)
def test_what_cannot_be_drawn_is_one_line(arguments, line, capsys):
    Path("mine.json").write_text(record().as_json())
    Path("table.md").write_text("| run |")
    Path("other.json").write_text('{"status": "finished"}')
    Path("newer.json").write_text(record().as_json().replace('"version": 1', '"version": 2'))
    assert cli.main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
    assert not list(Path().glob("*.html"))


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (["baseline"], "bf17", "Did you mean 'bf16'?"),
        (["sedes"], {}, "Did you mean 'seeds'?"),
        (["study"], "../mine", "study is the name of a file"),
        (["effects"], {"fp4": 3}, "such as {expected: +0.02}"),
        (["seeds"], {}, "'bf16'"),
        (["runs", "bf16", "0"], {"steps": 3}, "missing"),
        (["runs", "bf16", "0", "spiks"], 0, "Did you mean 'spikes'?"),
        (["runs", "bf16", "0", "seconds"], "many", "has text where a number should be"),
        (["runs", "bf16", "0", "metrics"], [], "'list' object"),
        (["runs", "bf16", "0", "history", "val_loss"], [[1]], "not enough values"),
        (["runs", "bf16", "0", "phases"], ["fqt"], "has text where a number should be"),
    ],
)
def test_a_damaged_record_is_one_line(path, value, line, capsys):
    content = json.loads(record().as_json())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    Path("mine.json").write_text(json.dumps(content))
    assert cli.main(["compare", "--from=mine.json"]) == 2
    error = capsys.readouterr().err
    assert "mine.json is damaged: " in error and line in error and error.count("\n") == 1


# --- the records of this project --------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[3] / "docs" / "results"
PAGES = [*DOCS.rglob("*.md")]
SPARED = {"seeds", "perplexity", "spikes", "tokens/s", "peak memory", "bits", "source"}  # columns a page may leave out
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)


def columns(table):
    """Cells of a table in markdown by column, the first of which names the rows; degrees of freedom are dropped."""
    text = re.sub(r" \(df \d+\)", "", table)
    lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines()]
    return {header: cells for header, _, *cells in zip(*lines, strict=True)}


def is_excerpt(table, whole, baseline="none"):
    """All rows, with all columns but some that a page may leave out; what a run measured besides is its choice, too.

    Differences of claims against the baseline are the gaps in the table of the runs.
    """
    spared = SPARED | {name for name in whole if name.startswith("val_")}
    if all(claim.endswith(f" against {baseline}") for claim in whole.get("claim", ["none"])):
        spared |= {"difference", "95 % interval"}
    return table.items() <= whole.items() and whole.keys() - table.keys() <= spared


def verdicts_in_words(table):
    """The sentence that may stand for a table of claims: all, or all but one, have one verdict, or a list of them."""
    verdicts = dict(zip(table.get("claim", []), table.get("verdict", []), strict=True))
    named = {claim.partition(" against ")[0]: of for claim, of in verdicts.items()}
    usual = max(sorted({*named.values()}), key=[*named.values()].count, default="")
    others = [f", but {run}: *{of}*" for run, of in named.items() if of != usual]
    if len(others) < 2 or len(named) < len(verdicts):
        return f"All {len(verdicts)} claims have *{usual}*{''.join(others)}" if verdicts and len(others) < 2 else ""
    of = {verdict: ", ".join(run for run in named if named[run] == verdict) for verdict in named.values()}
    return f"Of {len(verdicts)} claims {'; '.join(f'*{verdict}*: {runs}' for verdict, runs in of.items())}."


@each("path", sorted((DOCS / "studies").glob("*.json")), fast=5)
@pytest.mark.usefixtures("no_pictures")
def test_a_page_of_the_results_has_the_table_of_a_record(path):
    record = read_record(path)
    table = record.write(Path())
    pages = [page for page in PAGES if f"studies/{path.name})" in page.read_text()]
    assert pages, f"no page of the results links to {path.name}"
    texts = [page.read_text() for page in pages]
    shown = [columns(part) for text in texts for part in TABLE.findall(text)]
    for part in table.split("\n\n"):
        whole = columns(part)
        sentence = verdicts_in_words(whole)
        assert any(is_excerpt(excerpt, whole, record.baseline) for excerpt in shown) or any(
            sentence and sentence in " ".join(text.split()) for text in texts
        ), f"of {path.name}, no page has the rows\n{part}\nor says {sentence!r}"
    runs = sum(map(len, record.results.values()))
    assert path.stat().st_size < 1500 * runs, "records are small"
    assert Path(path.name if record.name else "study.json").read_text() == path.read_text()
