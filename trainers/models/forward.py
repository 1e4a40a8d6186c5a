"""The forward pass of a model, with activation checkpoints and automatic mixed precision (AMP).

**Activation checkpoints** (``memory.activation_checkpoints=true``): the layers are taken in
segments; of all but the last only the input is kept, and backward computes a segment's activations
again. With n layers in s segments about ``s + n / s`` activations are held instead of n, fewest at
s = sqrt(n), the default; backward costs up to one more forward pass. The bits do not change: a
segment with dropout draws the same random numbers again. Source: T. Chen et al. 2016, "Training
Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).

**Mixed precision** (``autocast=bfloat16``, or ``float16`` on a GPU): products and convolutions in
that type; parameters, gradients of parameters and the loss in float32, as ``torch.autocast``
chooses. Gradients in float16 underflow below 6e-8, so they are scaled: the gradient that enters the
model in backward is multiplied by a factor, and the gradients of the parameters are divided by it
before an update. torch's GradScaler halves the factor when a gradient overflowed (that update is
left out) and doubles it after 2,000 good updates. Every replica sums the same scaled gradients, so
all replicas decide alike.

A model keeps the types and names of its layers; only the way they are called changes, so that
training, evaluation and CUDA graphs need not know.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint_sequential

from trainers.config.memory import MemoryConfig


class _ScaledBackward(torch.autograd.Function):
    """The identity in forward; multiplies the gradient by the loss scale in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaler: GradScaler) -> Tensor:
        """Return a view of ``x``."""
        ctx.scaler = scaler
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return ``grad`` times the scale, and no gradient of the scaler."""
        return ctx.scaler.scale(grad), None


class _Forward(nn.Sequential):
    """A chain of layers whose forward pass is run as :func:`set_forward_` says."""

    segments: int
    draws: bool
    autocast: torch.dtype | None
    scaler: GradScaler | None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output in float32, from segments and in mixed precision where they are set."""
        mixed = (
            torch.autocast(x.device.type, self.autocast, cache_enabled=False)
            if self.autocast
            else nullcontext()
        )
        with mixed:
            if self.segments > 1 and torch.is_grad_enabled():
                y: Tensor = checkpoint_sequential(
                    list(self), self.segments, x, use_reentrant=False, preserve_rng_state=self.draws
                )
            else:
                y = super().forward(x)  # type: ignore[no-untyped-call]
        if self.autocast is not None:
            y = y.float()
        return y if self.scaler is None else _ScaledBackward.apply(y, self.scaler)  # type: ignore[no-untyped-call]


def set_forward_(
    model: nn.Module, memory: MemoryConfig, autocast: str = "none", scaler: GradScaler | None = None
) -> None:
    """Run ``model``'s forward pass, from now on, in segments and in mixed precision.

    Args:
        model: changed in place.
        memory: whether, and in how many segments, activations are checkpointed.
        autocast: type of products; ``none`` for that of the parameters.
        scaler: scales the gradients that enter the model in backward; None for unscaled ones.
    """
    if not memory.activation_checkpoints and autocast == "none":
        return
    assert isinstance(model, nn.Sequential)
    segments = (
        (memory.segments or math.ceil(math.sqrt(len(model))))
        if memory.activation_checkpoints
        else 1
    )
    model.__class__ = _Forward
    assert isinstance(model, _Forward)
    model.segments = min(segments, len(model))
    model.draws = any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
    model.autocast = None if autocast == "none" else getattr(torch, autocast)
    model.scaler = scaler
