"""Callbacks for the Trainer."""

from lightning_lowbit.callbacks.crash_safe_checkpoint import CrashSafeCheckpoint
from lightning_lowbit.callbacks.exact_resume import ExactResume
from lightning_lowbit.callbacks.graceful_interrupt import GracefulInterrupt
from lightning_lowbit.callbacks.gradient_noise_monitor import GradientNoiseMonitor
from lightning_lowbit.callbacks.gradient_norm_monitor import GradientNormMonitor
from lightning_lowbit.callbacks.loss_scale_monitor import LossScaleMonitor
from lightning_lowbit.callbacks.metric_triggers import Below, Plateau
from lightning_lowbit.callbacks.osci_reset import OsciReset
from lightning_lowbit.callbacks.outlier_monitor import OutlierMonitor
from lightning_lowbit.callbacks.precision_summary import PrecisionSummary
from lightning_lowbit.callbacks.precision_switch import PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks.progress_bar import LowBitProgressBar
from lightning_lowbit.callbacks.quantization_monitor import QuantizationMonitor
from lightning_lowbit.callbacks.run_report import RunReport
from lightning_lowbit.callbacks.spike_rollback import SpikeRollback
from lightning_lowbit.callbacks.throughput import Throughput
from lightning_lowbit.callbacks.weight_decay_switch import WeightDecaySwitch

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
