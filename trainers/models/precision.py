"""From a precision's name to the arithmetic: converts a float32 model."""

from __future__ import annotations

from torch import Tensor, nn

from lns_ops import LNSTensor, convert_, simulate_
from trainers.config import PrecisionConfig


def apply_precision(model: nn.Module, precision: PrecisionConfig) -> nn.Module:
    """``model`` (float32, initialised) in the arithmetic of ``precision``, converted in place."""
    if precision.simulated:
        return simulate_(model, precision.format, gradient_format=precision.gradient_format)
    fmt = precision.lns_format
    return model if fmt is None else convert_(model, fmt, scope=precision.scope)


def storage_of(tensor: Tensor) -> Tensor:
    """What a parameter or optimizer state keeps in memory: codes, or the tensor itself."""
    return tensor.codes if isinstance(tensor, LNSTensor) else tensor
