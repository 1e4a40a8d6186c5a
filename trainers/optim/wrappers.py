"""Optimizers around an optimizer: one for scaled gradients, one for an update on the CPU."""

from __future__ import annotations

import torch
from torch.amp.grad_scaler import GradScaler

from trainers.optim.offload import Offload


class ScaledOptimizer:
    """The optimizer of a training step whose gradients are scaled."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
        self._optimizer, self._scaler = optimizer, scaler

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Divide the gradients by the scale and update; then choose the next scale.

        The update is left out where a gradient has overflowed.
        """
        self._scaler.step(self._optimizer)
        self._scaler.update()


class OffloadedOptimizer:
    """The optimizer of a training step whose update runs on the CPU.

    Args:
        optimizer: steps the parameters of ``offload.own``.
        offload: holds the copy of the model's parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, offload: Offload) -> None:
        self._optimizer, self._offload = optimizer, offload

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the model's gradients."""
        self._offload.forget_gradients(set_to_none)

    def step(self) -> None:
        """Copy the gradients to the CPU, step there, and copy the weights back.

        Parameters without gradient are left out, as by every optimizer.
        """
        self._offload.pull_gradients()
        self._optimizer.step()
        self._offload.push()
