"""Optimizers around an optimizer: of scaled gradients, and of weights that live on the CPU."""

from __future__ import annotations

import torch
from torch.amp.grad_scaler import GradScaler

from trainers.optim.offload import Offload


class ScaledOptimizer:
    """What a training step calls as its optimizer where gradients are scaled."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
        self._optimizer, self._scaler = optimizer, scaler

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Divide the gradients by the scale and update, or leave the update out where one has
        overflowed; then choose the next scale."""
        self._scaler.step(self._optimizer)
        self._scaler.update()


class OffloadedOptimizer:
    """What a training step calls as its optimizer.

    Args:
        optimizer: of the parameters of ``offload.own``.
        offload: the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, offload: Offload) -> None:
        self._optimizer, self._offload = optimizer, offload

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the model's gradients."""
        self._offload.forget_gradients(set_to_none)

    def step(self) -> None:
        """Bring the gradients down, step, and bring the weights up; parameters without gradient are
        left out, as everywhere."""
        self._offload.pull_gradients()
        self._optimizer.step()
        self._offload.push()
