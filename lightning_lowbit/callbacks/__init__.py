"""Callbacks for the Trainer."""

from lightning_lowbit.callbacks.exact_resume import ExactResume
from lightning_lowbit.callbacks.graceful_interrupt import GracefulInterrupt
from lightning_lowbit.callbacks.precision_switch import PrecisionSwitch, QAFSwitch
from lightning_lowbit.callbacks.progress_bar import LowBitProgressBar

__all__ = ["ExactResume", "GracefulInterrupt", "LowBitProgressBar", "PrecisionSwitch", "QAFSwitch"]
