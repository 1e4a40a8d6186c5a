"""The forward pass of a model, with activation checkpoints and automatic mixed precision (AMP).

**Activation checkpoints** (``memory.activation_checkpoints=true``): the layers are divided into
segments. For all segments but the last, only the input is kept, and backward recomputes the
activations. With n layers in s segments about ``s + n / s`` activations are kept instead of n; the
minimum is at s = sqrt(n), the default. Backward costs up to one more forward pass. The bits do not
change: a segment with dropout draws the same random numbers again. Source: T. Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).

**Mixed precision** (``autocast=bfloat16``, or ``float16`` on a GPU): products and convolutions are
in that type; parameters, their gradients and the loss are in float32, as ``torch.autocast``
chooses. Gradients in float16 underflow below 6e-8, so they are scaled: the gradient that enters the
model in backward is multiplied by a factor, and the parameters' gradients are divided by it before
an update. torch's GradScaler halves the factor when a gradient has overflowed (and skips that
update) and doubles it after 2,000 good updates. All replicas sum the same scaled gradients, so they
make the same decisions.

A model keeps the types and names of its layers. Only its ``forward`` is replaced, so training,
evaluation and CUDA graphs need no special code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

from trainers.config.memory import MemoryConfig
from trainers.models.factory import made_by_user


class _ScaledBackward(torch.autograd.Function):
    """The identity in forward; multiplies the gradient by the loss scale in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaler: GradScaler) -> Tensor:
        """Return a view of ``x``."""
        ctx.scaler = scaler
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return ``grad`` times the scale, and None for the scaler."""
        return ctx.scaler.scale(grad), None


def _forward(
    layers: nn.Sequential,
    segments: int,
    draws: bool,
    autocast: torch.dtype | None,
    scaler: GradScaler | None,
    x: Tensor,
) -> Tensor:
    """Return the output in float32, with activation checkpoints and mixed precision if
    configured."""
    mixed = (
        torch.autocast(x.device.type, autocast, cache_enabled=False) if autocast else nullcontext()
    )
    with mixed:
        if segments > 1 and torch.is_grad_enabled():
            *kept, last = _cut(layers, segments)
            y: Tensor = x
            for segment in kept:
                y = checkpoint(segment, y, use_reentrant=False, preserve_rng_state=draws)
            y = last(y)
        else:
            y = nn.Sequential.forward(layers, x)  # type: ignore[no-untyped-call]
    if autocast is not None:
        y = y.float()
    apply: Callable[..., Tensor] = _ScaledBackward.apply
    return y if scaler is None else apply(y, scaler)


def _cut(layers: nn.Sequential, segments: int) -> list[nn.Sequential]:
    """Divide the layers into segments whose lengths differ by at most one.

    torch's ``checkpoint_sequential`` instead adds the remainder to the last segment, whose
    activations are kept.
    """
    ends = [len(layers) * i // segments for i in range(segments + 1)]
    parts = list(layers)
    return [nn.Sequential(*parts[start:end]) for start, end in pairwise(ends)]


def set_forward_(
    model: nn.Module, memory: MemoryConfig, autocast: str = "none", scaler: GradScaler | None = None
) -> None:
    """Set activation checkpoints and mixed precision for ``model``'s forward pass.

    Args:
        model: changed in place.
        memory: config of activation checkpoints.
        autocast: data type of products; ``none`` for the parameters' type.
        scaler: scaler of the gradients that enter the model in backward; None for no scaling.
    """
    if not memory.activation_checkpoints and autocast == "none":
        return
    assert isinstance(model, nn.Sequential)
    segments = (
        (memory.segments or math.ceil(math.sqrt(len(model))))
        if memory.activation_checkpoints
        else 1
    )
    dropout = any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
    draws = dropout or made_by_user(model)  # user modules may draw random numbers
    dtype = None if autocast == "none" else getattr(torch, autocast)
    model.forward = partial(  # type: ignore[method-assign]
        _forward, model, min(segments, len(model)), draws, dtype, scaler
    )
