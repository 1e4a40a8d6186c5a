"""The conversion of a float32 model into the arithmetic that a trial's precision names."""

from __future__ import annotations

from torch import nn

from lns_ops import LossScale, convert_, simulate_
from trainers.config import PrecisionConfig


def apply_precision(model: nn.Module, precision: PrecisionConfig) -> nn.Module:
    """Convert ``model`` (float32, initialised) in place to the arithmetic of ``precision``.

    Its parameters' gradients are divided by the loss scale, with which the loss must be made.
    """
    fmt = precision.lns_format
    if precision.simulated:
        simulate_(
            model,
            precision.format,
            gradient_format=precision.gradient_format,
            accumulation=precision.sums,
        )
    elif fmt is not None:
        convert_(model, fmt, scope=precision.scope)
    return LossScale(precision.gradient_scale).unscale_(model)
