"""Forecasting with PatchTST (arXiv 2211.14730): patches of a column are tokens, and columns share the network."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_lowbit._lightning import LRSchedulerCallable, OptimizerCallable
from lightning_lowbit.checks import choose, integer

from ..models import RecipeModule

# Names of `PatchTSTConfig` that may be changed. Widths are multiples of 128, the longest block of a format.
NETWORK: dict[str, Any] = {
    "d_model": 128,
    "ffn_dim": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_length": 16,
    "patch_stride": 8,
    "norm_type": "batchnorm",
    "pre_norm": True,
    "activation_function": "gelu",
    "pooling_type": None,  # the head reads all patches
    "positional_encoding_type": "sincos",
    "scaling": "std",  # of the context of each window and column
    "attention_dropout": 0.0,
    "ff_dropout": 0.0,
    "positional_dropout": 0.0,
    "path_dropout": 0.0,
    "head_dropout": 0.0,
}


class Forecaster(RecipeModule):
    """PatchTST of ``transformers`` on batches of :class:`~lightning_lowbit.recipes.series.data.Windows`.

    Each column of a window is a sample of its own, so a network takes any number of columns.

    Logs ``loss`` (mean squared error of standardized values), ``grad_norm``, ``val_loss``, and ``val_naive``, the error
    of forecasting that the last value stays; ``lowbit test`` logs ``test_loss`` and ``test_naive``.

    Args:
        context: steps that are read, as in the data.
        horizon: steps that are forecast, as in the data.
        config: what differs from ``NETWORK``, such as ``{"num_hidden_layers": 2}``.
        seed: of the initial weights; None takes that of ``seed_everything``, or 0.
        optimizer: creates the optimizer from the parameters.
        scheduler: creates the learning-rate schedule, stepped once per optimizer step; None for a constant rate.

    Raises:
        ValueError: the configuration has no such value, the context is no longer than a patch, or (before training) the
            data has another context or horizon.
    """

    makes_layers_at_once = True

    def __init__(
        self,
        context: int = 96,
        horizon: int = 24,
        config: dict[str, Any] | None = None,
        seed: int | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.context, self.horizon = integer("context", context, 1), integer("horizon", horizon, 1)
        with self.initialized(seed):
            self.model = _patch_tst(context, horizon, config or {})
        self.example_input_array = torch.zeros(2, context, 3)
        self.val_loss, self.val_naive, self.test_loss, self.test_naive = (
            MeanMetric(nan_strategy=math.nan) for _ in range(4)
        )

    def prepare_data(self) -> None:
        """Checks the data against the network, before any logger writes a file."""
        for name in ("context", "horizon"):
            steps = getattr(getattr(self.trainer, "datamodule", None), name, None)
            if steps not in (None, getattr(self, name)):
                raise ValueError(
                    f"The data has a {name} of {steps} steps, and the network one of {getattr(self, name)}. Set "
                    f"model.init_args.{name} and data.init_args.{name} to the same."
                )

    def forward(self, past: Tensor) -> Tensor:
        """Returns the ``[batch, horizon, columns]`` that follow on ``past``, ``[batch, context, columns]``."""
        columns = past.transpose(1, 2).reshape(-1, past.shape[1], 1)
        forecasts: Tensor = self.model(past_values=columns).prediction_outputs
        return forecasts.reshape(len(past), -1, self.horizon).transpose(1, 2)

    def _cut(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return batch[:, : self.context], batch[:, self.context :]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        past, future = self._cut(batch)
        loss = F.mse_loss(self(past).float(), future)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, part: str, batch: Tensor) -> None:
        past, future = self._cut(batch)
        for name, forecast in (("loss", self(past).float()), ("naive", past[:, -1:].expand_as(future))):
            metric = getattr(self, f"{part}_{name}")
            metric.update(F.mse_loss(forecast, future), len(batch))
            self.log(f"{part}_{name}", metric, prog_bar=True)


def _patch_tst(context: int, horizon: int, changes: Mapping[str, Any]) -> torch.nn.Module:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    for name in changes:
        choose("value of config", name, NETWORK)
    sizes = {"num_input_channels": 1, "context_length": context, "prediction_length": horizon}
    return PatchTSTForPrediction(PatchTSTConfig(**{**NETWORK, **changes, **sizes}))
