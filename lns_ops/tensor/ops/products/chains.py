"""Differentiable products of powers of LNSTensors, without storing intermediate products.

Gradients of quotients, powers and norms are such products. Intermediate results of torch's
formulas, such as ``(a / b) / b``, may leave a narrow format's range although the gradient does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lns_ops._compat import is_forward_mode, is_transforming
from lns_ops.functional import unclamped
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.lns_tensor import LNSTensor, gradient

Factors = Sequence[tuple[Tensor, float]]
"""Tensors and their exponents."""


class Chain(torch.autograd.Function):
    """A product: ``number / over`` times broadcast tensors of one format raised to powers.

    ``made`` computes the result from the tensors. A tensor with the power None is added to the
    product. The derivative by a factor is a product of the same kind, so derivatives of every
    order exist.
    """

    @staticmethod
    def forward(
        ctx: Any, made: Callable[..., LNSTensor], fmt: LNSFormat, powers: tuple[float | None, ...],
        number: float, over: float, *tensors: Tensor,
    ) -> LNSTensor:  # fmt: skip
        wanted = [
            w and p is not None for w, p in zip(ctx.needs_input_grad[5:], powers, strict=True)
        ]
        used = [
            p is not None and (any(wanted[:i] + wanted[i + 1 :]) or (wanted[i] and p != 1))
            for i, p in enumerate(powers)
        ]
        ctx.save_for_backward(*(x if u else None for x, u in zip(tensors, used, strict=True)))
        ctx.shapes, ctx.options = [x.shape for x in tensors], (fmt, powers, number, over)
        return made(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fmt, powers, number, over = ctx.options
        found: list[Tensor | None] = []
        factors = list(zip(ctx.saved_tensors, powers, strict=True))
        for i, (power, shape) in enumerate(zip(powers, ctx.shapes, strict=True)):
            if not ctx.needs_input_grad[5 + i]:
                found.append(None)
            elif power is None:
                found.append(slope([(grad, 1.0)], fmt, shape))
            else:
                less = [(x, p - 1 if j == i else p) for j, (x, p) in enumerate(factors) if p]
                others = [(x, p) for x, p in less if p]
                found.append(slope([(grad, 1.0), *others], fmt, shape, number * power, over))
        return None, None, None, None, None, *found


def chain(factors: Factors, fmt: LNSFormat, number: float = 1.0, over: float = 1.0) -> LNSTensor:
    """Return ``number / over`` times tensors raised to powers, clamped once.

    A zero factor makes the result zero, even with a negative power: callers reject or mask these.
    """
    powers = tuple(p for _, p in factors if p)

    def made(*tensors: Any) -> LNSTensor:
        codes = [(x.codes, p) for x, p in zip(tensors, powers, strict=True)]
        return LNSTensor(unclamped.product(codes, fmt, number, over), fmt)

    kept = [x for x, p in factors if p]
    return chained(made, kept, powers, number, over)


def chained(
    made: Callable[..., LNSTensor], tensors: Sequence[Tensor], powers: tuple[float | None, ...],
    number: float = 1.0, over: float = 1.0,
) -> LNSTensor:  # fmt: skip
    """Return ``made(*tensors)``, with the gradients of :class:`Chain`."""
    fmt = tensors[0].fmt  # type: ignore[attr-defined]
    given = made, fmt, powers, number, over, *tensors
    found: LNSTensor = Chain.apply(*given)  # type: ignore[no-untyped-call]
    return found


def slope(
    factors: Factors, fmt: LNSFormat, shape: torch.Size, number: float = 1.0, over: float = 1.0
) -> LNSTensor:
    """Return a gradient for an operand of ``shape``, which may be broadcast: a sum of chains.

    The first factor is the incoming gradient, which may have another format. For double backward
    the gradient is not summed here; the engine does that.
    """
    (grad, _), *others = factors
    grad = gradient(grad, fmt)
    if torch.is_grad_enabled():
        return chain([(grad, 1.0), *others], fmt, number, over)
    codes = [(x.codes, p) for x, p in ((grad, 1.0), *others)]  # type: ignore[attr-defined]
    return LNSTensor(unclamped.folded(codes, shape, fmt, number, over), fmt)


class OverCounts(torch.autograd.Function):
    """Quotients by integers of at least 1, which are exact even beyond the format's range."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, counts: Tensor) -> LNSTensor:
        ctx.save_for_backward(counts)
        return LNSTensor(unclamped.divided(x.codes, counts, x.fmt), x.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (counts,) = ctx.saved_tensors
        return OverCounts.apply(grad, counts), None  # type: ignore[no-untyped-call]


def are_chained(*tensors: Any) -> bool:
    """Return whether these gradients are computed here, not by a transform or forward mode."""
    return (
        torch.is_grad_enabled()
        and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        and not is_transforming()
        and not is_forward_mode()
    )
