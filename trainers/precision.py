"""From a precision's name to the arithmetic: converts a float32 model and makes the optimizer that fits."""

from __future__ import annotations

from torch import nn

from lns_ops import convert_
from lns_ops.optim import SGD
from trainers.config import OptimizerConfig, PrecisionConfig


def apply_precision(model: nn.Module, precision: PrecisionConfig) -> nn.Module:
    """``model`` (float32, initialised) in the arithmetic of ``precision``, converted in place."""
    fmt = precision.lns_format
    return model if fmt is None else convert_(model, fmt, scope=precision.scope)


def make_optimizer(model: nn.Module, optimizer: OptimizerConfig, precision: PrecisionConfig, batch_size: int) -> SGD:
    """The optimizer of a trial whose loss is the *sum* over a batch: 1 / batch_size is folded into the learning rate.

    Low-precision gradients of a mean would lose their small entries to underflow (lns12 ends at 2^-16); those of a sum do not.

    Raises:
        ValueError: the folded learning rate underflows in the format.
    """
    return SGD(model.parameters(), lr=optimizer.lr / batch_size, momentum=optimizer.momentum, kahan_sum=precision.kahan_sum)
