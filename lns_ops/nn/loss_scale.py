"""Loss scaling: gradients that are larger on their way back, and as they were where they arrive.

A narrow format has a smallest magnitude, 2^-16 in lns12, and many gradients of a deep network's
outputs are smaller. Where the gradient of the loss is S times larger, so are they; the gradient of
a parameter is divided by S as it arrives. So optimizers, clipping and all-reduce see the gradients
that they would see without, and what would have underflowed on the way.

S is a power of two, so that in LNS both products are exact: a logarithm moves by whole octaves. It
is constant, as LNS has no infinities by which a scale that is too large could be found; gradients
beyond the largest magnitude saturate. :attr:`lns_ops.Analysis.loss_scale` is one that fits.

Source: P. Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2, with a constant factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from lns_ops.tensor.lns_tensor import LNSTensor

_Module = TypeVar("_Module", bound=nn.Module)


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class LossScale:
    """A constant factor on all gradients between a loss and the parameters.

    ::

        scale = lns_ops.LossScale(256)
        scale.unscale_(net)                # once
        scale(loss).backward()             # p.grad is that of loss.backward(), with less underflow

    Args:
        factor: a power of two, 1 or more.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, factor: float) -> None:
        if not (math.isfinite(factor) and factor >= 1 and math.log2(factor).is_integer()):
            raise ValueError(
                f"factor={factor}: must be a power of two, 1 or more, so that logarithms move by"
                " whole octaves; use for example 256"
            )
        self.factor = float(factor)

    def __call__(self, loss: Tensor) -> Tensor:
        """Return ``loss``, whose value stays and whose gradient is ``factor`` times larger."""
        if self.factor == 1:
            return loss
        apply: Callable[[Tensor, float], Tensor] = _Scaled.apply
        return apply(loss, self.factor)

    def unscale_(self, module: _Module) -> _Module:
        """Divide the gradient of each parameter by ``factor`` as it arrives, from now on.

        Returns:
            ``module``.

        Raises:
            ValueError: ``1 / factor`` underflows in the format of a parameter.
        """
        if self.factor == 1:
            return module
        for name, parameter in module.named_parameters():
            if isinstance(parameter, LNSTensor) and self.factor * parameter.fmt.smallest > 1:
                raise ValueError(
                    f"factor={self.factor:g} for the parameter {name} in {parameter.fmt}: its"
                    " inverse underflows there, and with it every gradient; use at most"
                    f" {2.0 ** math.floor(-math.log2(parameter.fmt.smallest)):g}"
                )
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._divide)
        return module

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _divide(self, gradient: Tensor) -> Tensor:
        return gradient * (1 / self.factor)
