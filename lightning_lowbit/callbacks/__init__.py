"""Callbacks for the Trainer."""

from lightning_lowbit.callbacks.exact_resume import ExactResume
from lightning_lowbit.callbacks.graceful_interrupt import GracefulInterrupt
from lightning_lowbit.callbacks.precision_summary import PrecisionSummary
from lightning_lowbit.callbacks.precision_switch import PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks.progress_bar import LowBitProgressBar
from lightning_lowbit.callbacks.run_report import RunReport
from lightning_lowbit.callbacks.throughput import Throughput

__all__ = [
    "ExactResume",
    "GracefulInterrupt",
    "LowBitProgressBar",
    "PrecisionSummary",
    "PrecisionSwitch",
    "QAFSwitch",
    "RunReport",
    "Throughput",
]
