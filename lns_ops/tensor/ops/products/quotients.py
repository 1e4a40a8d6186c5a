"""Quotients and powers whose gradients are clamped once, by :mod:`.chains`.

torch's formulas store ``(a / b) / b`` and ``(1 / b) (1 / b)``, which underflow in narrow formats
where the gradient does not: of ``10 / 2000`` with an incoming gradient of 1,000 it is -0.0025, and
``10 / 2000 / 2000`` is zero in lns12. Products are exact, so where nothing leaves the range these
are the bits of torch's formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import DisableTorchFunction
from lns_ops.functional.indexed import power
from lns_ops.tensor import promotion
from lns_ops.tensor.lns_tensor import LNSTensor, gradient, operands
from lns_ops.tensor.ops.arithmetic import binary, in_one_node
from lns_ops.tensor.ops.products.chains import are_chained, slope
from lns_ops.tensor.registry import PAIRS, aten, replaces


class _Quotient(torch.autograd.Function):
    """The quotient ``x / y`` of one format: ``dx = dz / y`` and ``dy = -dz x / y^2``."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, y: LNSTensor) -> LNSTensor:
        _, wanted_y = ctx.needs_input_grad
        ctx.save_for_backward(x if wanted_y else None, y)
        ctx.shape = x.codes.shape
        return LNSTensor(lns.div(x.codes, y.codes, x.fmt), x.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        wanted_x, wanted_y = ctx.needs_input_grad
        fmt, dx, dy = y.fmt, None, None
        if wanted_x and not torch.is_grad_enabled() and grad.shape == ctx.shape:
            dx = LNSTensor(lns.div(gradient(grad, fmt).codes, y.codes, fmt), fmt)
        elif wanted_x:
            dx = slope([(grad, 1), (y, -1)], fmt, ctx.shape)
        if wanted_y:
            dy = slope([(grad, 1), (x, 1), (y, -2)], fmt, y.shape, -1.0)
        return dx, dy


class _Inverse(torch.autograd.Function):
    """A number over a tensor, ``n / y``, with ``dy = -dz n / y^2``."""

    @staticmethod
    def forward(ctx: Any, y: LNSTensor, number: float) -> LNSTensor:
        ctx.save_for_backward(y)
        result = binary(aten.div.Tensor, number, y)
        # a number below the range counts as zero
        ctx.number = number if lns.number_code(number, y.fmt) else 0.0
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return slope([(grad, 1), (y, -2)], y.fmt, y.shape, -ctx.number), None


class _InverseRoot(torch.autograd.Function):
    """``r = x^(-1/2)``, with ``dx = -dz r^3 / 2``."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor) -> LNSTensor:
        result = LNSTensor(power(x.codes, -0.5, x.fmt), x.fmt)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return slope([(grad, 1), (result, 3)], result.fmt, result.shape, -0.5)


class _Power(torch.autograd.Function):
    """``x^p`` for a number p, with ``dx = p dz x^(p - 1)``."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, exponent: float) -> LNSTensor:
        ctx.save_for_backward(x)
        ctx.exponent = exponent
        return LNSTensor(power(x.codes, exponent, x.fmt), x.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        p = ctx.exponent
        if p and p < 1:
            power(x.codes, p - 1, x.fmt)  # refuses zero
        return slope([(grad, 1), (x, p - 1)], x.fmt, x.shape, p), None


class _AddedProduct(torch.autograd.Function):
    """``x + value y z^power``, for a power of 1 or -1."""

    @staticmethod
    def forward(
        ctx: Any, x: LNSTensor, y: LNSTensor, z: LNSTensor, value: float, power: int
    ) -> LNSTensor:
        ctx.save_for_backward(y, z)
        ctx.options = x.shape, value, power
        operator = aten.mul.Tensor if power == 1 else aten.div.Tensor
        return binary(aten.add.Tensor, x, binary(operator, y, z), value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y, z), (shape, value, power) = ctx.saved_tensors, ctx.options
        wanted, fmt = ctx.needs_input_grad, y.fmt
        dx = slope([(grad, 1)], fmt, shape) if wanted[0] else None
        dy = slope([(grad, 1), (z, power)], fmt, y.shape, value) if wanted[1] else None
        of_z = [(grad, 1), (y, 1), (z, power - 1)]
        dz = slope(of_z, fmt, z.shape, value * power) if wanted[2] else None
        return dx, dy, dz, None, None


def _torchs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with DisableTorchFunction():
        return function(*args, **kwargs)


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (float, int) for value in values)


def _in_one_format(name: str, *tensors: Any) -> list[Any]:
    """Return tensors as LNSTensors of the format of the first one, those that are none encoded."""
    first = next(x for x in tensors if isinstance(x, LNSTensor))
    made = []
    for x in tensors:
        if not isinstance(x, LNSTensor):
            if x.dtype.is_floating_point:
                promotion.count(name)
            with promotion.named(name):
                x = LNSTensor(operands(name, first, x)[1], first.fmt)
        made.append(x)
    return made


def _have_one_format(*values: Any) -> bool:
    """Return whether all are tensors, those in LNS of one format."""
    return all(isinstance(x, Tensor) for x in values) and (
        len({x.fmt for x in values if isinstance(x, LNSTensor)}) == 1
    )


DIVISIONS = (
    torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide,
    Tensor.__truediv__,
)  # fmt: skip


def _divided(function: Callable[..., Any]) -> Callable[..., Any]:
    def divide(input: Any, other: Any, **options: Any) -> Any:
        if options.get("rounding_mode") is None and are_chained(other):
            if _are_numbers(input):
                return _Inverse.apply(other, float(input))  # type: ignore[no-untyped-call]
            if _have_one_format(input, other):
                both = _in_one_format("div", input, other)
                return _Quotient.apply(*both)  # type: ignore[no-untyped-call]
        return _torchs(function, input, other, **options)

    return divide


for _division in DIVISIONS:
    replaces(_division)(_divided(_division))
PAIRS.update(dict.fromkeys(DIVISIONS, in_one_node(_Quotient)))


@replaces(Tensor.__rdiv__, Tensor.__rtruediv__)
def _over(input: LNSTensor, other: Any) -> Any:
    """Return ``other / input``."""
    if _are_numbers(other) and are_chained(input):
        return _Inverse.apply(input, float(other))  # type: ignore[no-untyped-call]
    return _torchs(Tensor.__rdiv__, input, other)


@replaces(torch.reciprocal, Tensor.reciprocal)
def reciprocal(input: LNSTensor) -> Any:
    """Return ``1 / x``."""
    if are_chained(input):
        return _Inverse.apply(input, 1.0)  # type: ignore[no-untyped-call]
    return _torchs(torch.reciprocal, input)


@replaces(torch.rsqrt, Tensor.rsqrt)
def rsqrt(input: LNSTensor) -> Any:
    """Return ``1 / sqrt(x)``."""
    if are_chained(input):
        return _InverseRoot.apply(input)  # type: ignore[no-untyped-call]
    return _torchs(torch.rsqrt, input)


@replaces(torch.square, Tensor.square)
def square(input: LNSTensor) -> Any:
    """Return ``x^2``."""
    if are_chained(input):
        return _Power.apply(input, 2.0)  # type: ignore[no-untyped-call]
    return _torchs(torch.square, input)


@replaces(torch.pow, Tensor.pow, Tensor.__pow__)
def pow(input: Any, exponent: Any) -> Any:
    """Return powers, of which only those by a number have a gradient of their own."""
    if _are_numbers(exponent) and are_chained(input):
        return _Power.apply(input, float(exponent))  # type: ignore[no-untyped-call]
    return _torchs(torch.pow, input, exponent)


def _with_product(function: Callable[..., Any], power: int) -> Callable[..., Any]:
    def added(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
        tensors = input, tensor1, tensor2
        if _are_numbers(value) and _have_one_format(*tensors) and are_chained(*tensors):
            made = _in_one_format(function.__name__, *tensors)
            return _AddedProduct.apply(*made, value, power)  # type: ignore[no-untyped-call]
        return _torchs(function, input, tensor1, tensor2, value=value)

    return added


replaces(torch.addcmul, Tensor.addcmul)(_with_product(torch.addcmul, 1))
replaces(torch.addcdiv, Tensor.addcdiv)(_with_product(torch.addcdiv, -1))
