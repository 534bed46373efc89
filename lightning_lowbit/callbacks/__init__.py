"""Callbacks for the Trainer."""

from lightning_lowbit.callbacks.monitors.gradient_noise import GradientNoiseMonitor
from lightning_lowbit.callbacks.monitors.gradient_norm import GradientNormMonitor
from lightning_lowbit.callbacks.monitors.loss_scale import LossScaleMonitor
from lightning_lowbit.callbacks.monitors.outliers import OutlierMonitor
from lightning_lowbit.callbacks.monitors.quantization import QuantizationMonitor
from lightning_lowbit.callbacks.monitors.throughput import Throughput
from lightning_lowbit.callbacks.osci_reset import OsciReset
from lightning_lowbit.callbacks.precision_summary import PrecisionSummary
from lightning_lowbit.callbacks.progress_bar import LowBitProgressBar
from lightning_lowbit.callbacks.recovery.crash_safe_checkpoint import CrashSafeCheckpoint
from lightning_lowbit.callbacks.recovery.exact_resume import ExactResume
from lightning_lowbit.callbacks.recovery.graceful_interrupt import GracefulInterrupt
from lightning_lowbit.callbacks.recovery.spike_rollback import SpikeRollback
from lightning_lowbit.callbacks.run_report import RunReport
from lightning_lowbit.callbacks.switches.metric_triggers import Below, Plateau
from lightning_lowbit.callbacks.switches.precision import PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks.switches.weight_decay import WeightDecaySwitch

__all__ = [
    "Below",
    "CrashSafeCheckpoint",
    "ExactResume",
    "GracefulInterrupt",
    "GradientNoiseMonitor",
    "GradientNormMonitor",
    "LossScaleMonitor",
    "LowBitProgressBar",
    "OsciReset",
    "OutlierMonitor",
    "Plateau",
    "PrecisionSummary",
    "PrecisionSwitch",
    "QAFSwitch",
    "QuantizationMonitor",
    "RunReport",
    "SpikeRollback",
    "Throughput",
    "WeightDecaySwitch",
]
