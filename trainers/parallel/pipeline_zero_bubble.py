"""Deferred weight gradients, with which zero-bubble pipelines fill their bubbles.

The previous stage waits for the gradient of a linear layer's input, ``dx = dy w``; no stage waits
for ``dw = dy^T x`` and ``db = sum dy``. Zero-bubble schedules compute them later. Torch's own way
to split a backward pass asks autograd first for the inputs' gradients and then for the parameters'.
A layer whose backward is a single autograd function, such as an LNS layer, would compute everything
twice. Therefore the backward of a deferred layer only returns ``dx``, and puts ``(x, dy)`` into its
stage's queue. The schedule (``dw_builder`` of torch.distributed.pipelining) takes one micro-batch's
entries at a time, in their order. The products have the same operands as in the layer's usual
backward, so the gradients have the same bits.

Limits: two-dimensional inputs; parameters must not be shared between layers. Source: P. Qi et al.
2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops.tensor.gradient_sums import add_gradient_

Work = Callable[[], None]


class Deferred:
    """The deferred work of a stage: filled by backward passes, taken once after each."""

    def __init__(self) -> None:
        self._waiting: list[Work] = []

    def put(self, work: Work) -> None:
        """Defer ``work``."""
        self._waiting.append(work)

    def take(self) -> Work:
        """Return all deferred work as one function, and clear the queue."""
        taken, self._waiting = self._waiting, []

        def run() -> None:
            for work in taken:
                work()

        return run


class _DeferredFunction(torch.autograd.Function):
    """A linear layer whose backward defers the gradients of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: Deferred
    ) -> Tensor:
        """Return ``x weight^T + bias``."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Return the input's gradient, and defer the gradients of weight and bias."""
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias

        @torch.no_grad()
        def gradients() -> None:
            add_gradient_(weight, grad.t() @ x)
            if bias is not None:
                add_gradient_(bias, grad.sum(0))

        ctx.deferred.put(gradients)
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, None


def _forward(layer: nn.Linear, deferred: Deferred, x: Tensor) -> Tensor:
    """Return the outputs ``[B, O]`` of the inputs ``[B, I]``."""
    apply: Callable[..., Tensor] = _DeferredFunction.apply
    return apply(x, layer.weight, layer.bias, deferred)


def defer_(module: nn.Module, deferred: Deferred) -> None:
    """Make the linear layers in ``module`` leave their weight gradients in ``deferred``.

    Their ``forward`` is set; types, names and parameters stay. Layers of other kinds that can defer
    have an attribute ``deferred``, which is set.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(_forward, layer, deferred)  # type: ignore[method-assign]
        elif hasattr(layer, "deferred"):
            layer.__dict__["deferred"] = deferred
