"""Rates by a clock that the test turns: each training and validation step takes as long as it says."""

import csv
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_lowbit import FP4Precision, FP8Precision, PrecisionSummary, TernaryPrecision, Throughput
from lightning_lowbit.callbacks.monitors import throughput
from lightning_lowbit.callbacks.monitors.throughput import peaks_of
from lightning_lowbit.data_sheets import PEAKS
from lightning_lowbit.nn.native.devices import declared
from tests.lightning_imports import BoringModel, CSVLogger, RandomDataset, Trainer, quiet_trainer
from tests.tables import each

SECONDS = [1000.0, 2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0]  # of each batch; the first compiles and allocates
BATCH, WIDTH = 4, 32


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(time=50.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now.time))
    return now


class Model(BoringModel):
    def __init__(self, clock, recompute=False):
        super().__init__()
        self.clock, self.batches, self.recompute = clock, 0, recompute

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x)

    def training_step(self, batch, batch_idx):
        self.clock.time += SECONDS[self.batches]
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.time += 100
        return super().validation_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(RandomDataset(WIDTH, 8 * BATCH), batch_size=BATCH)

    val_dataloader = train_dataloader


def fit(model, *callbacks, **kwargs):
    """Runs, and returns what was logged, row by row."""
    defaults = {"max_steps": 6, "log_every_n_steps": 2, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    logger = CSVLogger("logs")
    quiet_trainer(logger=logger, callbacks=list(callbacks), **{**defaults, **kwargs}).fit(model)
    with open(logger.experiment.metrics_file_path, newline="") as file:
        return list(csv.DictReader(file))


def column(rows, name):
    return [float(row[name]) for row in rows if row.get(name)]


def rates(count, seconds=(2, (3 + 5) / 2, (7 + 11) / 2)):
    """So many in a batch, over the mean seconds of the batches of each logged step; logged in float32."""
    return pytest.approx([count / s for s in seconds], rel=1e-5)


@each(
    "options, seconds",
    [
        ({}, (2, 4, 9)),  # over the batches since the last time it was logged; the first batch of all is left out
        # After three batches: the clock restarts, and the fourth is alone.
        ({"limit_val_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 1}, (2, 5, 9)),
        # Logged where the optimizer steps, over all micro-batches.
        ({"accumulate_grad_batches": 2, "max_steps": 3, "log_every_n_steps": 1}, (2, 4, 9)),
        ({"limit_train_batches": 3}, (2, 4, 9)),  # over epochs the time goes on
    ],
)
def test_samples_per_second(clock, options, seconds):
    rows = fit(Model(clock), Throughput(), **options)
    assert column(rows, "samples/s") == rates(BATCH, seconds)
    assert "tflops" not in rows[0] and "mfu" not in rows[0]


def test_another_unit(clock):
    rows = fit(Model(clock), Throughput("tokens", count=lambda batch: batch.numel()))
    assert column(rows, "tokens/s") == rates(BATCH * WIDTH)
    assert "samples/s" not in rows[0]
    with pytest.raises(ValueError, match=r"how many words a Tensor holds \(AttributeError: .*Give another count"):
        fit(Model(clock), Throughput("words", count=lambda batch: batch.words))


def test_a_second_run_begins_anew(clock):
    callback = Throughput()
    fit(Model(clock), callback)
    clock.time += 1e6
    assert column(fit(Model(clock), callback, max_steps=2), "samples/s") == rates(BATCH, [2])


def test_two_processes(clock, monkeypatch):
    """Samples are those of all processes, FLOPs those of one device; the module's own number of these goes first."""
    monkeypatch.setattr(Trainer, "distributed_sampler_kwargs", property(lambda _: {"num_replicas": 2, "rank": 0}))
    for others in ([], [PrecisionSummary(quiet=True)]):
        model = Model(clock)
        model.flops_per_batch = 1000
        rows = fit(model, *others, Throughput(peak_flops={"float32": 5000.0}))
        assert column(rows, "samples/s") == rates(2 * BATCH)
        assert column(rows, "mfu") == rates(1000 / 5000)


# --- FLOPs and peaks --------------------------------------------------------------------------------------------------

# Of BoringModel's only layer, 32 -> 2: no gradient of its input is needed.
FORWARD = 2 * BATCH * WIDTH * 2
FLOPS = 2 * FORWARD
BY_DTYPE = {"bfloat16": 4e4, "float32": 1e4, "float4": 1.0}


@each(
    "settings, peak",
    [
        (lambda: {"plugins": [FP4Precision(compute_dtype="bf16", backend="emulated")]}, 4e4),
        (lambda: {"plugins": [FP4Precision(compute_dtype="fp32", backend="emulated")]}, 1e4),
        (lambda: {"precision": "bf16-mixed"}, 4e4),
        (lambda: {"precision": "32-true"}, 1e4),
        # FLOPs are those of a micro-batch, and so are the batches.
        (lambda: {"accumulate_grad_batches": 2, "max_steps": 3, "log_every_n_steps": 1}, 1e4),
    ],
    fast=2,
)
def test_measured_flops(clock, settings, peak):
    """Those of the first step, over the peak of what GEMMs are executed in."""
    rows = fit(Model(clock), PrecisionSummary(quiet=True), Throughput(peak_flops=BY_DTYPE), **settings())
    assert column(rows, "tflops") == rates(FLOPS / 1e12)
    assert column(rows, "mfu") == rates(FLOPS / peak)


SECOND_IN_HP = {"overrides": {r"layer\.1": "bf16"}, "compute_dtype": "fp32"}


@each(
    "make, peaks, native",
    [
        (lambda: FP8Precision("current", **SECOND_IN_HP), {"float8": 8e4, "float32": 1e4}, 2),
        (lambda: FP8Precision("current", **SECOND_IN_HP), {"float32": 1e4}, None),
        # Of a ternary layer the forward pass alone is native.
        (lambda: TernaryPrecision(**SECOND_IN_HP), {"int8": 8e4, "float8": 1.0, "float32": 1e4}, 1),
        (lambda: TernaryPrecision(**SECOND_IN_HP), {"float8": 8e4, "float32": 1e4}, None),
        (lambda: FP4Precision(**SECOND_IN_HP), {"int8": 8e4, "float32": 1e4}, 2),  # GEMMs of codes
    ],
    fast=2,
)
def test_native_gemms_have_the_peak_of_their_kind(clock, make, peaks, native):
    """Of two layers of one size the first is native; no gradient of its input is needed."""
    model = Model(clock)
    model.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    # 16 rows, of which nothing is padded.
    model.train_dataloader = lambda: DataLoader(RandomDataset(WIDTH, 8 * 16), batch_size=16)
    with declared("cpu", {"fp8", "int8", "cpu"}):
        rows = fit(model, PrecisionSummary(quiet=True), Throughput(peak_flops=peaks), plugins=[make()])
    if native is None:
        assert "mfu" not in rows[0], "a peak is unknown"
    else:
        gemm = 2 * 16 * WIDTH * WIDTH
        assert column(rows, "mfu") == rates(native * gemm / 8e4 + (5 - native) * gemm / 1e4)


def test_recomputed_activations_do_not_count(clock):
    model, summary = Model(clock, recompute=True), PrecisionSummary(quiet=True)
    model.layer = nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh())
    rows = fit(model, summary, Throughput(peak_flops=BY_DTYPE))
    assert summary.counter.recomputed == FORWARD
    assert summary.coverage().flops == FLOPS + FORWARD
    assert column(rows, "mfu") == rates(FLOPS / 1e4)


@each("peaks", [None, {}, {"bfloat16": 1.0}])
def test_no_utilization_without_a_peak(clock, peaks):
    """Of a CPU none is known, and another type's does not help."""
    rows = fit(Model(clock), PrecisionSummary(quiet=True), Throughput(peak_flops=peaks))
    assert column(rows, "tflops") == rates(FLOPS / 1e12)
    assert "mfu" not in rows[0]


@each("name, chip", [
    ("NVIDIA GB200", "GB200"), ("NVIDIA B200", "B200"), ("NVIDIA H200", "H200"), ("NVIDIA H200 NVL", "H200 NVL"),
    ("NVIDIA GH200 480GB", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"),
    ("NVIDIA H100 NVL", "H100 NVL"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100 80GB PCIe", "A100"),
    ("NVIDIA L40S", "L40S"), ("NVIDIA L40", None), ("NVIDIA H20", None), ("NVIDIA RTX A1000 Laptop GPU", None),
    ("Tesla T4", None), ("AMD Instinct MI300X", None),
])  # fmt: skip
def test_peaks_by_the_name_of_the_device(monkeypatch, name, chip):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peaks_of(torch.device("cuda", 0)) == (PEAKS[chip] if chip else {})
    assert peaks_of(torch.device("cpu")) == {}


def test_peaks_are_dense_and_grow_as_bits_shrink():
    for chip, peaks in PEAKS.items():
        assert list(peaks.values()) == sorted(peaks.values()), chip
        for wide, narrow in (("bfloat16", "float8"), ("float8", "float4")):
            if narrow in peaks:
                # GeForce cards sum products of 8 bits in float32 at half of their speed, those of 4 bits at all of it.
                factor = 4 if (chip, narrow) == ("RTX 5090", "float4") else 2
                assert peaks[narrow] / peaks[wide] == pytest.approx(factor, rel=0.02), f"{chip}: {narrow}"
