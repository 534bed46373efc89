"""``lowbit compare``: what is planned, what is kept over a kill, and what the table says."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightning_lowbit import cli
from lightning_lowbit.cli.lab.compare.command import _is_running, environment, prepare, runs_of
from lightning_lowbit.cli.lab.compare.record import markdown
from lightning_lowbit.cli.lab.compare.study import product
from lightning_lowbit.units import has_units
from tests.cli.compare.conftest import result
from tests.launch import start, wait_for

BASE = ["--config=quickstart", "--config=tiny.yaml"]


def compare(*arguments):
    return cli.main(["compare", *BASE, *arguments])


def make(vary=(), rates=(), seeds=(0,), arguments=(), base=("quickstart",)):
    return runs_of(product(base, vary, rates, seeds), Path("out"), arguments)


def test_runs_at_a_time_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = [environment(jobs).get("OMP_NUM_THREADS") for jobs in (1, 2, 3, 16)]
    assert threads == [None, "4", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment(2) == dict(os.environ), "the user's choice holds"


def test_plan_is_the_product():
    runs = make([["bf16", "nvfp4+qaf"], ["none", "adamw"]], ["1e-3", "3e-4"], [0, 7])
    rows = ("bf16", "bf16+adamw", "nvfp4+qaf", "nvfp4+qaf+adamw")
    assert [run.row for run in runs[::2]] == [f"{row},lr={rate}" for row in rows for rate in ("1e-3", "3e-4")]
    assert [run.seed for run in runs[:4]] == [0, 7, 0, 7]
    last = runs[-1]
    assert last.folder == Path("out/nvfp4+qaf+adamw,lr=3e-4/seed_7")
    config = yaml.safe_load(last.recipe)
    assert (config["seed_everything"], config["trainer"]["default_root_dir"]) == (7, str(last.folder))
    optimizer = config["model"]["init_args"]["optimizer"]
    assert (optimizer["class_path"], optimizer["init_args"]["lr"]) == ("torch.optim.AdamW", 3e-4)
    names = [callback["class_path"] for callback in config["trainer"]["callbacks"]]
    assert names.count("lightning_lowbit.QAFSwitch") == names.count("lightning_lowbit.RunReport") == 1
    assert [run.row for run in make()] == ["base"]


def test_each_recipe_has_one_report():
    ours = {"class_path": "lightning_lowbit.RunReport"}
    there = "lightning_lowbit.callbacks.RunReport", {"class_path": "RunReport"}
    for callbacks, expected in ((None, [ours]), ("mine.Other", ["mine.Other", ours]), *zip(there, there, strict=True)):
        Path("plain.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
        (run,) = make(base=("plain.yaml",))
        assert yaml.safe_load(run.recipe)["trainer"]["callbacks"] == expected


@pytest.mark.slow
def test_a_saved_configuration_is_compared_in_folders_of_its_own(capsys):
    assert cli.main(["fit", *BASE]) == 0
    saved = "runs/quickstart+tiny/version_0/config.yaml"
    assert cli.main(["compare", f"--config={saved}", "--output=again"]) == 0
    assert "| base | 1 |" in capsys.readouterr().out
    assert len(list(Path("again/base/seed_0").glob("version_*"))) == 1
    assert not Path("runs/quickstart+tiny/version_1").exists()


class Killed(Callback):
    """Ends its process in the last validation, once."""

    def on_validation_start(self, trainer, pl_module):
        if trainer.global_step == trainer.max_steps and not Path("killed").exists():
            Path("killed").touch()
            os._exit(9)


@pytest.mark.slow
def test_a_run_killed_in_its_last_validation_begins_afresh(capsys):
    killer = "--trainer.callbacks+=tests.cli.compare.test_runs.Killed"
    often = "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {every_n_train_steps: 2, save_last: true}}"
    assert compare(often, killer) == 1, "the run was not killed"
    checkpoints = list(Path("runs/compare/base").rglob("last.ckpt"))
    assert [torch.load(path, weights_only=True)["global_step"] for path in checkpoints] == [8]
    assert compare(often, killer) == 0
    (run,) = make(base=("quickstart", "tiny.yaml"))
    result = json.loads(max(Path("runs/compare").rglob("run.json")).read_text())
    assert result["history"]["val_loss"][-1][0] == 8, "the last validation is missing"
    assert f"{result['metrics']['val_loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--dryrun"], "There is no option --dryrun. Did you mean '--dry_run'?"),
        (["--jobs=0"], "--jobs is the number of runs at a time, 1 or more; got 0"),
        (["--lr=high"], "--lr takes numbers such as 1e-3,3e-4; got 'high'"),
        (["--lr=1e-3,0.001"], "twice"),
        (["--lr=1e-3", "--model.init_args.optimizer.init_args.lr=5"], "contradict each other"),
        (["--config=goes_on.yaml"], "ckpt_path"),
        (["--vary=bf16,bf16"], "The study has the row 'bf16' twice"),
        (["--vary=bf16,other/bf16.yaml"], "The study has the row 'bf16' twice"),
        (["--seeds=1,1"], "The study has the seed '1' twice"),
        (["--seeds=-1"], "a seed is a whole number, 0 or more and at most 4294967295; got -1"),
        (["--vary=bf17"], "Did you mean 'bf16'?"),
        (["--vary=bf16,nvfp4", "--baseline=bf16+x"], "there is no row 'bf16+x'. Did you mean 'bf16'?"),
        (["--seed_everything=3"], "use --seeds"),
        (["--trainer.default_root_dir=x"], "use --seeds and --output"),
        (["--config=no_optimizer.yaml", "--lr=1e-3"], "names its optimizer"),
    ],
)
def test_a_wrong_study_writes_nothing(arguments, line, capsys):
    Path("other").mkdir()
    Path("other/bf16.yaml").write_text("{}")
    Path("goes_on.yaml").write_text("ckpt_path: last")
    Path("no_optimizer.yaml").write_text("model: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}")
    assert compare(*arguments) == 2
    assert line in capsys.readouterr().err
    assert not Path("runs").exists()


def begun(*arguments, end="{}"):
    """A run in a folder that says how it ended."""
    (run,) = make(arguments=arguments, base=("quickstart", "tiny.yaml"))
    prepare([run])
    (run.folder / "run.json").write_text(end)
    return run


def test_a_study_in_another_place_goes_on_there():
    begun()
    Path("out").rename("moved")
    (moved,) = runs_of(product(["quickstart", "tiny.yaml"], (), (), (0,)), Path("moved").absolute(), ())
    prepare([moved])
    assert moved.written == moved.content, "the run would write into the folder of before"


def test_a_run_without_its_recipe_does_not_count():
    run = begun()
    (run.folder / "recipe.yaml").unlink()
    with pytest.raises(ValueError, match="out/base/seed_0 holds a run without a recipe.yaml. Give another --output"):
        prepare([run])


@pytest.mark.parametrize("end", ["", "[]", "{}", '{"status": "fin'])
def test_a_damaged_result_is_named(end):
    with pytest.raises(ValueError, match="out/base/seed_0/run.json is damaged. Remove out/base/seed_0, so that"):
        begun(end=end).finished()


def test_a_dry_run_refuses_runs_of_another_configuration(capsys):
    begun()
    assert compare("--dry_run", "--output=out", "--trainer.max_steps=5") == 2
    assert "out/base/seed_0 holds a run of another configuration" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_once_and_tabulates(capsys):
    study = ["--vary=bf16,nvfp4", "--seeds=0,1", "--jobs=2"]
    assert compare(*study, "--dry_run") == 0
    assert capsys.readouterr().out.count("seed") == 4 and not Path("runs").exists()
    assert compare(*study) == 0
    capsys.readouterr()
    table = Path("runs/compare/table.md").read_text()
    header, _, bf16, nvfp4 = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    gap = ["gap to bf16", "95 % interval"]
    assert header == ["run", "seeds", "loss", "perplexity", *gap, "spikes", "tokens/s", "peak memory", "bits"]
    bits = 16 if has_units(torch.bfloat16, torch.device("cpu")) else 32
    assert bf16[:2] == ["bf16", "2"] and bf16[4] == "baseline" and bf16[-1] == f"{bits}.00 ± 0.00"
    assert nvfp4[:2] == ["nvfp4", "2"] and nvfp4[4][0] in "+-" and 4.5 < float(nvfp4[-1].split()[0]) < bits
    pictures = {path.name: path.read_bytes()[:4] for path in Path("runs/compare").glob("*.png")}
    assert pictures == dict.fromkeys(("loss.png", "gap.png"), b"\x89PNG")
    times = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("run.json")}
    assert len(times) == 4
    assert compare("--vary=bf16,nvfp4", "--seeds=1,0") == 0, "a study may grow and change its order"
    assert "4 runs in runs/compare, 4 of them finished." in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("run.json")} == times
    assert compare(*study, "--trainer.max_steps=5") == 2
    assert "another configuration" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_is_said_and_the_others_go_on(capsys):
    Path("broken.yaml").write_text("model: {init_args: {network: nonsense}}")
    assert compare("--vary=broken.yaml,bf16", "--baseline=bf16") == 1
    captured = capsys.readouterr()
    assert "failed: broken, seed 0; see runs/compare/broken/seed_0/log.txt" in captured.err
    assert "network: there is no 'nonsense'" in Path("runs/compare/broken/seed_0/log.txt").read_text()
    assert "| broken | 0 |" in captured.out and "| bf16 | 1 |" in captured.out


STUDY = ["--vary=bf16,nvfp4", "--trainer.max_steps=60", "--trainer.callbacks.init_args.every_n_train_steps=2"]


def begin():
    return start(Path("log.txt"), "lightning_lowbit.cli", "compare", *BASE, *STUDY)


def written(pattern, process):
    """The file that the process writes."""
    return wait_for(lambda: next(Path("runs/compare").glob(pattern), None), process, Path("log.txt"))


@pytest.mark.slow
def test_killed_half_way_and_restarted_it_keeps_what_is_finished(capsys):
    process = begin()
    finished = written("bf16/seed_0/*/run.json", process)
    time = finished.stat().st_mtime_ns
    written("nvfp4/seed_0/*/checkpoints/last.ckpt", process)
    process.kill()
    process.join()
    assert compare(*STUDY) == 0
    assert "2 runs in runs/compare, 1 of them finished." in capsys.readouterr().out
    assert finished.stat().st_mtime_ns == time, "a finished run was run again"
    assert "| nvfp4 | 1 |" in Path("runs/compare/table.md").read_text()
    assert len(list(Path("runs/compare/nvfp4").rglob("run.json"))) == 1, "the run left over was run twice"


def interrupt(row, number, status):
    """Sends a signal while a row is running."""
    process = begin()
    written(f"{row}/seed_0/*/checkpoints/last.ckpt", process)
    os.kill(process.pid, number)
    process.join(60)
    output = Path("log.txt").read_text()
    assert process.exitcode == status and "Traceback" not in output, output


@pytest.mark.slow
def test_ctrl_c_saves_and_a_restart_goes_on(capsys):
    interrupt("nvfp4", signal.SIGINT, status=130)
    (interrupted,) = Path("runs/compare").glob("nvfp4/seed_0/*/checkpoints/interrupted.ckpt")
    step = torch.load(interrupted, weights_only=True)["global_step"]
    assert 0 < step < 60, "the machine was so fast that nothing was interrupted"
    assert compare(*STUDY) == 0
    assert "nvfp4, seed 0 resumes" in capsys.readouterr().out
    assert f"Resuming from {interrupted}" in Path("runs/compare/nvfp4/seed_0/log.txt").read_text()


@pytest.mark.slow
def test_sigterm_reaches_the_runs_and_ends_with_143():
    interrupt("bf16", signal.SIGTERM, status=143)
    assert list(Path("runs/compare").glob("bf16/seed_0/*/checkpoints/interrupted.ckpt")), "the run has not saved"
    (run, _) = make([["bf16", "nvfp4"]], base=("quickstart", "tiny.yaml"))
    assert not _is_running(replace(run, folder=Path("runs/compare/bf16/seed_0"))), "the run goes on alone"
    assert not Path("runs/compare/nvfp4/seed_0/version_0").exists(), "another run has begun"


def measured(val_loss, losses=()):
    history = {"tokens/s": [[1, 100.0], [2, 300.0], [3, 200.0]], "loss": list(enumerate(losses))}
    metrics = {"val_loss": val_loss, "val_perplexity": 2.0}
    return result(val_loss, metrics=metrics, history=history, summary={"average_bits": 4.5})


def test_table_pairs_gaps_by_seed():
    a = {0: measured(1.0), 1: measured(2.0)}
    b = {0: measured(1.1), 1: measured(2.3), 2: measured(9.0)}
    unknown = {0: result(1.0, metrics={"loss": 1.0})}
    *_, b, c, unknown = markdown({"a": a, "b": b, "c": {}, "unknown": unknown}, "a").splitlines()
    assert "| +0.2000 | -1.0706 to +1.4706 (df 1) |" in b, "seed 2 has no baseline"
    assert "| b | 3 | 4.1333 ± 4.2572 | 2.000 ± 0.000 |" in b
    assert "| 200 ± 0 | 1.00 GiB | 4.50 ± 0.00 |" in b
    assert c == "| c | 0 |  |  |  |  |  |  |  |  |" and unknown.startswith("| unknown | 1 |  |  |  |  |")


def test_other_validation_metrics_have_columns():
    metrics = {"val_loss": 1.0, "val_perplexity": 2.0, "val_accuracy": 0.75}
    accurate = result(1.0, metrics=metrics, validation_metrics=["val_loss", "val_accuracy"])
    header, _, a, b = markdown({"a": {0: measured(1.0)}, "b": {0: accurate}}, "a").splitlines()
    assert header.startswith("| run | seeds | loss | perplexity | val_accuracy | gap to a |")
    assert a.startswith("| a | 1 | 1.0000 | 2.000 |  | baseline |") and "| 2.000 | 0.7500 | +0.0000 |" in b


def test_table_shows_what_diverged():
    spiked = measured(None, [1.0] * 20 + [None])
    table = markdown({"a": {0: measured(1.0)}, "b": {0: spiked}}, "a").splitlines()[-1]
    assert table.startswith("| b | 1 | nan |") and "| +nan |" in table
    assert "| 1.0 |" in table, "a loss that is no number is a spike"
