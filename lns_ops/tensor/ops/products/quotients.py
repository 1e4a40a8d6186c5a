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
from lns_ops.functional.indexed import power
from lns_ops.tensor import promotion
from lns_ops.tensor.lns_tensor import LNSTensor, operands
from lns_ops.tensor.ops.arithmetic import binary, in_one_node
from lns_ops.tensor.ops.products.chains import Chain, are_chained, chained, slope
from lns_ops.tensor.registry import PAIRS, aten, replaces, torchs


def _quotient(x: LNSTensor, y: LNSTensor) -> LNSTensor:
    return chained(lambda x, y: LNSTensor(lns.div(x.codes, y.codes, x.fmt), x.fmt), (x, y), (1, -1))


def _inverse(number: float, y: LNSTensor) -> LNSTensor:
    # a number below the range counts as zero
    factor = number if lns.number_code(number, y.fmt) else 0.0
    return chained(lambda y: binary(aten.div.Tensor, number, y), [y], (-1,), factor)


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


class _Power(Chain):
    """``x^p`` for a number p, with ``dx = p dz x^(p - 1)``, which has no value at 0 for p < 1."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fmt, (p,), _, _ = ctx.options
        if p and p < 1:
            power(ctx.saved_tensors[0].codes, p - 1, fmt)  # refuses zero
        return Chain.backward(ctx, grad)


def _powered(x: LNSTensor, p: float) -> Any:
    def made(x: LNSTensor) -> LNSTensor:
        return LNSTensor(power(x.codes, p, x.fmt), x.fmt)

    return _Power.apply(made, x.fmt, (p,), 1.0, 1.0, x)  # type: ignore[no-untyped-call]


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
                return _inverse(float(input), other)
            if _have_one_format(input, other):
                return _quotient(*_in_one_format("div", input, other))
        return torchs(function, input, other, **options)

    return divide


for _division in DIVISIONS:
    replaces(_division)(_divided(_division))
PAIRS.update(dict.fromkeys(DIVISIONS, in_one_node(_quotient)))


@replaces(Tensor.__rdiv__, Tensor.__rtruediv__)
def _over(input: LNSTensor, other: Any) -> Any:
    """Return ``other / input``."""
    if _are_numbers(other) and are_chained(input):
        return _inverse(float(other), input)
    return torchs(Tensor.__rdiv__, input, other)


@replaces(torch.reciprocal, Tensor.reciprocal)
def reciprocal(input: LNSTensor) -> Any:
    """Return ``1 / x``."""
    if are_chained(input):
        return _inverse(1.0, input)
    return torchs(torch.reciprocal, input)


@replaces(torch.rsqrt, Tensor.rsqrt)
def rsqrt(input: LNSTensor) -> Any:
    """Return ``1 / sqrt(x)``."""
    if are_chained(input):
        return _InverseRoot.apply(input)  # type: ignore[no-untyped-call]
    return torchs(torch.rsqrt, input)


@replaces(torch.square, Tensor.square)
def square(input: LNSTensor) -> Any:
    """Return ``x^2``."""
    if are_chained(input):
        return _powered(input, 2.0)
    return torchs(torch.square, input)


@replaces(torch.pow, Tensor.pow, Tensor.__pow__)
def pow(input: Any, exponent: Any) -> Any:
    """Return powers, of which only those by a number have a gradient of their own."""
    if _are_numbers(exponent) and are_chained(input):
        return _powered(input, float(exponent))
    return torchs(torch.pow, input, exponent)


def _with_product(function: Callable[..., Any], power: int) -> Callable[..., Any]:
    operator = aten.mul.Tensor if power == 1 else aten.div.Tensor

    def added(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
        def sum_of(x: LNSTensor, y: LNSTensor, z: LNSTensor) -> LNSTensor:
            return binary(aten.add.Tensor, x, binary(operator, y, z), value)

        tensors = input, tensor1, tensor2
        if _are_numbers(value) and _have_one_format(*tensors) and are_chained(*tensors):
            made = _in_one_format(function.__name__, *tensors)
            return chained(sum_of, made, (None, 1, power), value)
        return torchs(function, input, tensor1, tensor2, value=value)

    return added


replaces(torch.addcmul, Tensor.addcmul)(_with_product(torch.addcmul, 1))
replaces(torch.addcdiv, Tensor.addcdiv)(_with_product(torch.addcdiv, -1))
