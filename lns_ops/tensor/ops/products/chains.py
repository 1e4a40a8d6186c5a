"""Products of powers of LNSTensors, differentiable, with nothing stored between the factors.

Gradients of quotients, powers and norms are such products. What torch's formulas store on the way,
as ``(a / b) / b``, may leave a narrow format's range although the gradient does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lns_ops._compat import is_forward_mode, is_transforming
from lns_ops.functional import unclamped
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.lns_tensor import LNSTensor, gradient

Factors = Sequence[tuple[Tensor, float]]
"""Tensors and the powers that they are raised to."""


class _Chain(torch.autograd.Function):
    """The product ``number / over`` times tensors of one format raised to powers, broadcast.

    The derivative by a factor is a product of the same kind, so it has derivatives of every order.
    """

    @staticmethod
    def forward(
        ctx: Any, fmt: LNSFormat, powers: tuple[float, ...], number: float, over: float,
        *tensors: Tensor,
    ) -> LNSTensor:  # fmt: skip
        ctx.save_for_backward(*tensors)
        ctx.options = fmt, powers, number, over
        codes: list[Any] = [x.codes for x in tensors]  # type: ignore[attr-defined]
        factors = list(zip(codes, powers, strict=True))
        product = unclamped.product(factors, fmt, number, over)
        return LNSTensor(unclamped.packed(product, fmt), fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fmt, powers, number, over = ctx.options
        factors = list(zip(ctx.saved_tensors, powers, strict=True))
        found: list[Tensor | None] = []
        for i, (x, power) in enumerate(factors):
            if not ctx.needs_input_grad[4 + i]:
                found.append(None)
                continue
            others = [(grad, 1.0), *factors[:i], (x, power - 1), *factors[i + 1 :]]
            found.append(slope(others, fmt, x.shape, number * power, over))
        return None, None, None, None, *found


def chain(factors: Factors, fmt: LNSFormat, number: float = 1.0, over: float = 1.0) -> LNSTensor:
    """Return ``number / over`` times tensors raised to powers, clamped once.

    A zero factor makes it zero, also one of a negative power: callers refuse or mask those.
    """
    kept = [(x, p) for x, p in factors if p]
    given = fmt, tuple(p for _, p in kept), number, over, *(x for x, _ in kept)
    made: LNSTensor = _Chain.apply(*given)  # type: ignore[no-untyped-call]
    return made


def slope(
    factors: Factors, fmt: LNSFormat, shape: torch.Size, number: float = 1.0, over: float = 1.0
) -> LNSTensor:
    """Return a gradient for an operand of ``shape``, which may have been repeated: a sum of chains.

    The first factor is the incoming gradient, which may have another format. What is to be
    differentiated in its turn is not summed: the engine does that.
    """
    (grad, _), *others = factors
    grad = gradient(grad, fmt)
    if torch.is_grad_enabled():
        return chain([(grad, 1.0), *others], fmt, number, over)
    codes = [(x.codes, p) for x, p in ((grad, 1.0), *others)]  # type: ignore[attr-defined]
    product = unclamped.product(codes, fmt, number, over)
    return LNSTensor(unclamped.folded(product, shape, fmt), fmt)


class OverCounts(torch.autograd.Function):
    """Quotients by whole numbers from 1 on, which count in full beyond the format's range."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, counts: Tensor) -> LNSTensor:
        ctx.save_for_backward(counts)
        return LNSTensor(unclamped.divided(x.codes, counts, x.fmt), x.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (counts,) = ctx.saved_tensors
        return OverCounts.apply(grad, counts), None  # type: ignore[no-untyped-call]


def are_chained(*tensors: Any) -> bool:
    """Return whether gradients of these are taken here, and not by a transform or forward mode."""
    return (
        torch.is_grad_enabled()
        and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        and not is_transforming()
        and not is_forward_mode()
    )
