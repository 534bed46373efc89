"""Deprecated: scalers of the loss are imported from ``lightning_lowbit``. This module goes with version 0.3."""

import warnings

from lightning_lowbit.precision.grad_scalers import *  # noqa: F403

warnings.warn(
    "lightning_lowbit.scalers is deprecated: import scalers from lightning_lowbit.", DeprecationWarning, stacklevel=2
)
