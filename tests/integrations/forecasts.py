"""``python -m tests.integrations.forecasts``: models of neuralforecast, which uses ``pytorch_lightning``, in NVFP4.

It trains, predicts, saves, loads and predicts again, and prints what came of it as JSON.
"""

import json

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS, TFT, PatchTST

from lightning_lowbit import FP4Precision
from lightning_lowbit.nn import QuantLinear

OFF = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
QUIET = {"accelerator": "cpu", "devices": 1, **OFF}
TINY = {"h": 8, "input_size": 24, "max_steps": 3, "val_check_steps": 3, "batch_size": 2, "windows_batch_size": 16}


def options():
    return {**TINY, **QUIET, "plugins": [FP4Precision("nvfp4")]}


def series():
    days = pd.date_range("2020-01-01", periods=120, freq="D")
    waves = {name: np.sin(np.arange(len(days)) / 7 + phase) for phase, name in enumerate("ab")}
    return pd.concat([pd.DataFrame({"unique_id": name, "ds": days, "y": wave}) for name, wave in waves.items()])


def main():
    sizes = {
        "hidden_size": 16,
        "n_heads": 4,
        "linear_hidden_size": 32,
        "encoder_layers": 1,
        "patch_len": 8,
        "stride": 4,
    }
    models = [NHITS(**options(), mlp_units=[[32, 32]] * 3), PatchTST(**options(), **sizes)]
    models.append(TFT(**options(), hidden_size=16, n_head=2))
    forecast = NeuralForecast(models, freq="D")
    forecast.fit(series())
    before = forecast.predict()
    forecast.save("saved", save_dataset=True)

    loaded = NeuralForecast.load("saved")
    plain = loaded.predict()
    for model in loaded.models:
        model.trainer_kwargs["plugins"] = [FP4Precision("nvfp4")]  # neuralforecast saves no plugins
    after = loaded.predict()
    told = {}
    for model in forecast.models:
        name = type(model).__name__
        told[name] = {
            "converted": any(isinstance(module, QuantLinear) for module in model.modules()),
            "finite": bool(np.isfinite(before[name]).all()),
            "differs without the plugin": not before[name].equals(plain[name]),
            "same after loading": before[name].equals(after[name]),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
