"""Quotients and powers whose gradients are clamped once, by :mod:`.chains`.

torch's formulas store ``(a / b) / b`` and ``(1 / b) (1 / b)``. In narrow formats these can
underflow although the gradient does not. For ``10 / 2000`` with an incoming gradient of 1,000 the
gradient is -0.0025, but ``10 / 2000 / 2000`` is zero in lns12. Products are exact, so if nothing
leaves the range the bits are the same as with torch's formulas. In-place functions write the
out-of-place result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.functional import unclamped
from lns_ops.functional.indexed import lookup, power
from lns_ops.tensor import promotion
from lns_ops.tensor.lns_tensor import LNSTensor, gradient, operands
from lns_ops.tensor.ops.activations import exponents_of, power_of_each, power_parts
from lns_ops.tensor.ops.arithmetic import binary, in_one_node
from lns_ops.tensor.ops.products.chains import Chain, are_chained, chained, slope
from lns_ops.tensor.registry import PAIRS, aten, replaces, torchs


def _quotient(x: LNSTensor, y: LNSTensor) -> LNSTensor:
    return chained(lambda x, y: LNSTensor(lns.div(x.codes, y.codes, x.fmt), x.fmt), (x, y), (1, -1))


def _inverse(number: float, y: LNSTensor) -> LNSTensor:
    # a number below the range becomes zero
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
    """``x^p`` for a number p, with ``dx = p dz x^(p - 1)``, undefined at 0 for p < 1."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fmt, (p,), _, _ = ctx.options
        if p and p < 1:
            power(ctx.saved_tensors[0].codes, p - 1, fmt)  # raises for zero
        return Chain.backward(ctx, grad)


def _powered(x: LNSTensor, p: float) -> Any:
    def made(x: LNSTensor) -> LNSTensor:
        return LNSTensor(power(x.codes, p, x.fmt), x.fmt)

    return _Power.apply(made, x.fmt, (p,), 1.0, 1.0, x)  # type: ignore[no-untyped-call]


class _PowerOfEach(torch.autograd.Function):
    """``x^y`` of two tensors, with ``dx = dz y x^(y - 1)`` and ``dy = dz x^y log x``.

    ``y`` may be an integer tensor. For ``x = 0``, ``dy`` is 0, as in torch.
    """

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, y: Tensor) -> LNSTensor:
        ctx.save_for_backward(x, y)
        return power_of_each(aten.pow.Tensor_Tensor, x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        (wanted_x, wanted_y), fmt, dx, dy = ctx.needs_input_grad, x.fmt, None, None
        grad = gradient(grad, fmt)
        if torch.is_grad_enabled():  # the gradient itself needs a gradient (double backward)
            if wanted_x:
                dx = (grad * (y * x.pow(y - 1))).masked_fill(y == 0, 0.0)
            if wanted_y:
                dy = grad * (x.pow(y) * x.masked_fill(x == 0, 1.0).log())
            return dx, dy
        exponents = exponents_of(y, fmt, x.codes.device)
        given = unclamped.unpacked(grad.codes, fmt)
        if wanted_x:
            base = x.codes.masked_fill(exponents == 0, fmt.bias)  # their gradient is 0
            steep = unclamped.times(given, power_parts(base, exponents - 1, fmt))
            factor = LNSTensor.from_float(y, fmt) if not isinstance(y, LNSTensor) else y
            steep = unclamped.times(steep, unclamped.unpacked(factor.codes, fmt))
            dx = LNSTensor(unclamped.folded_parts(steep, x.shape, fmt), fmt)
        if wanted_y:
            log = lookup(x.codes.masked_fill(x.codes == 0, fmt.bias), "log", fmt)
            result = unclamped.raised_to_each(x.codes, exponents, fmt)  # checked by forward
            steep = unclamped.times(given, result)
            steep = unclamped.times(steep, unclamped.unpacked(log, fmt))
            dy = LNSTensor(unclamped.folded_parts(steep, y.shape, fmt), fmt)
        return dx, dy


class _PowerOfNumber(torch.autograd.Function):
    """``r = b^x`` for a number b, with ``dx = dz r log b``."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, base: float) -> LNSTensor:
        result = LNSTensor(lookup(x.codes, "power_of", x.fmt, base), x.fmt)
        ctx.save_for_backward(result)
        ctx.log = math.log(base)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return slope([(grad, 1), (result, 1)], result.fmt, result.shape, ctx.log), None


class _Logarithm(torch.autograd.Function):
    """A logarithm to another base than e, with ``dx = dz / (x log b)``."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, function: str, log: float) -> LNSTensor:
        ctx.save_for_backward(x)
        ctx.log = log
        return LNSTensor(lookup(x.codes, function, x.fmt), x.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return slope([(grad, 1), (x, -1)], x.fmt, x.shape, over=ctx.log), None, None


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (float, int) for value in values)


def _in_one_format(name: str, *tensors: Any) -> list[Any]:
    """Return tensors as LNSTensors in the format of the first one; floats are encoded."""
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
    """Return whether all are tensors, and the LNSTensors among them have one format."""
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
    """Return powers."""
    if not are_chained(input, exponent):
        return torchs(torch.pow, input, exponent)
    if _are_numbers(exponent):
        return _powered(input, float(exponent))
    if _are_numbers(input):
        return _power_of(float(input), exponent)
    if not _have_one_format(input, exponent) or exponent.dtype.is_complex:
        return torchs(torch.pow, input, exponent)
    if isinstance(input, LNSTensor) and not exponent.is_floating_point():
        return _PowerOfEach.apply(input, exponent)  # type: ignore[no-untyped-call]
    both = _in_one_format("pow", input, exponent)
    return _PowerOfEach.apply(*both)  # type: ignore[no-untyped-call]


def _power_of(base: float, x: LNSTensor) -> Any:
    if base > 0:
        return _PowerOfNumber.apply(x, base)  # type: ignore[no-untyped-call]
    return torchs(torch.pow, base, x)


@replaces(Tensor.__rpow__)
def _rpow(input: LNSTensor, other: Any) -> Any:
    """Return ``other^input``."""
    return pow(other, input)


@replaces(torch.exp2, Tensor.exp2, torch.special.exp2)
def exp2(input: LNSTensor) -> Any:
    """Return ``2^x``."""
    return _power_of(2.0, input) if are_chained(input) else torchs(torch.exp2, input)


def _logarithm(function: Callable[..., Any], base: float) -> Callable[..., Any]:
    name, log = function.__name__, math.log(base)

    def logarithm(input: LNSTensor) -> Any:
        if are_chained(input):
            return _Logarithm.apply(input, name, log)  # type: ignore[no-untyped-call]
        return torchs(function, input)

    return logarithm


replaces(torch.log2, Tensor.log2)(_logarithm(torch.log2, 2))
replaces(torch.log10, Tensor.log10)(_logarithm(torch.log10, 10))


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


def _in_place(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the in-place function ``own`` with the gradient of ``function``."""

    def written(input: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, LNSTensor) and are_chained(input, *args):
            result = function(input.clone(), *args, **kwargs)
            if result.shape == input.shape:  # otherwise torch's own function raises
                return input.copy_(result)
        return torchs(own, input, *args, **kwargs)

    return written


_IN_PLACE: dict[Callable[..., Any], tuple[Callable[..., Any], ...]] = {
    torch.div: (Tensor.div_, Tensor.divide_, Tensor.true_divide_, Tensor.__itruediv__),
    torch.reciprocal: (Tensor.reciprocal_, torch.reciprocal_),
    torch.rsqrt: (Tensor.rsqrt_, torch.rsqrt_),
    torch.square: (Tensor.square_, torch.square_),
    torch.pow: (Tensor.pow_, Tensor.__ipow__),
    torch.exp2: (Tensor.exp2_, torch.exp2_),
    torch.log2: (Tensor.log2_, torch.log2_),
    torch.log10: (Tensor.log10_, torch.log10_),
    torch.addcmul: (Tensor.addcmul_,),
    torch.addcdiv: (Tensor.addcdiv_,),
}
for _function, _all_own in _IN_PLACE.items():
    for _own in _all_own:
        replaces(_own)(_in_place(_function, _own))
