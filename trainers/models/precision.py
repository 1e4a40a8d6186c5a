"""The conversion of a float32 model into the arithmetic that a trial's precision names."""

from __future__ import annotations

from torch import nn

from lns_ops import convert_, simulate_
from trainers.config import PrecisionConfig


def apply_precision(model: nn.Module, precision: PrecisionConfig) -> nn.Module:
    """Convert ``model`` (float32, initialised) in place to the arithmetic of ``precision``."""
    if precision.simulated:
        return simulate_(model, precision.format, gradient_format=precision.gradient_format)
    fmt = precision.lns_format
    return model if fmt is None else convert_(model, fmt, scope=precision.scope)
