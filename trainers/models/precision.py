"""From a precision's name to the arithmetic: converts a float32 model."""

from __future__ import annotations

from torch import nn

from lns_ops import convert_, simulate_
from trainers.config import PrecisionConfig


def apply_precision(model: nn.Module, precision: PrecisionConfig) -> nn.Module:
    """``model`` (float32, initialised) in the arithmetic of ``precision``, converted in place."""
    if precision.simulated:
        return simulate_(model, precision.format, gradient_format=precision.gradient_format)
    fmt = precision.lns_format
    return model if fmt is None else convert_(model, fmt, scope=precision.scope)
