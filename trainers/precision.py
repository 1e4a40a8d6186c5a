"""From a precision's name to the arithmetic: converts a float32 model and makes the optimizer that fits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lns_ops import convert_
from lns_ops.optim import SGD, Adam, AdamW
from trainers.config import OptimizerConfig, PrecisionConfig


def apply_precision(model: nn.Module, precision: PrecisionConfig) -> nn.Module:
    """``model`` (float32, initialised) in the arithmetic of ``precision``, converted in place."""
    fmt = precision.lns_format
    return model if fmt is None else convert_(model, fmt, scope=precision.scope)


def make_optimizer(
    model: nn.Module, optimizer: OptimizerConfig, precision: PrecisionConfig, batch_size: int, seed: int = 0, scale: float = 1.0
) -> torch.optim.Optimizer:
    """The optimizer of a trial whose loss is the *sum* over a batch, making the step of the mean.

    Low-precision gradients of a mean would lose their small entries to underflow (lns12 ends at 2^-16); those of a sum do not. So sgd
    takes lr / batch_size; Adam's step does not depend on the gradient's scale, but its eps and the decay added to the gradient do, and are
    multiplied by batch_size.

    Args:
        seed: of stochastic rounding.
        scale: of ``optimizer.lr``.

    Raises:
        ValueError: a value underflows, or a decay rounds to 1, in the format.
    """
    rounding: dict[str, Any] = {"kahan_sum": precision.kahan_sum, "stochastic_rounding": precision.stochastic_rounding}
    rounding |= {"seed": seed % (1 << 31), "arithmetic": precision.update_arithmetic}
    parameters, lr = model.parameters(), optimizer.lr * scale
    if optimizer.name == "sgd":
        return SGD(parameters, lr=lr / batch_size, momentum=optimizer.momentum, **rounding)
    kind, decay = (AdamW, optimizer.weight_decay) if optimizer.name == "adamw" else (Adam, optimizer.weight_decay * batch_size)
    first, second = optimizer.betas
    return kind(parameters, lr, (first, second), optimizer.eps * batch_size, decay, **rounding)
