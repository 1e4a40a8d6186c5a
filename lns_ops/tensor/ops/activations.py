"""Functions of one number and their gradients: exp, log, powers, activation functions.

Smooth functions are table look-ups (:mod:`lns_ops.spec.unary_functions`), rounded once. There are
two kinds of gradients. If autograd's formula consists of products and quotients, which are exact in
LNS, it is used (exp, log, sqrt, powers). Formulas of activation functions would subtract nearly
equal rounded numbers, so their derivatives have a table, which is multiplied by the incoming
gradient. For that ``sigmoid``, ``tanh`` and ``expm1`` save their argument instead of the result
that torch saves, because near 1 the result no longer determines the derivative. In-place functions
(``torch.sigmoid_``, ``elu`` with ``inplace=True``) write the result of the out-of-place function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import DisableTorchFunction
from lns_ops.functional import unclamped
from lns_ops.functional.indexed import lookup, power
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.limits.decays import warn_of_factors
from lns_ops.tensor.limits.underflow import is_real
from lns_ops.tensor.lns_tensor import LNSTensor, operands
from lns_ops.tensor.registry import aten, handles, replaces, replaces_untraced


def _tabled(x: LNSTensor, function: str, *parameters: float) -> LNSTensor:
    return LNSTensor(lookup(x.codes, function, x.fmt, *parameters), x.fmt)


def _sloped(grad: LNSTensor, x: LNSTensor, function: str, *parameters: float) -> LNSTensor:
    """Return the incoming gradient times a derivative at ``x``."""
    slope, grad_codes, fmt = operands(function, _tabled(x, function, *parameters), grad)
    return LNSTensor(lns.mul(slope, grad_codes, fmt), fmt)


_PLAIN = {
    aten.exp.default: "exp", aten.expm1.default: "expm1", aten.log.default: "log",
    aten.log2.default: "log2", aten.log10.default: "log10", aten.log1p.default: "log1p",
    aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh", aten.silu.default: "silu",
    aten.mish.default: "mish", aten.hardsigmoid.default: "hardsigmoid",
    aten.hardswish.default: "hardswish",
}  # fmt: skip
_SLOPES = {
    aten.silu_backward.default: "d_silu", aten.mish_backward.default: "d_mish",
    aten.hardsigmoid_backward.default: "d_hardsigmoid",
    aten.hardswish_backward.default: "d_hardswish",
    aten.sigmoid_backward.default: "d_sigmoid_of_result",
    aten.tanh_backward.default: "d_tanh_of_result",
}  # fmt: skip


@handles(*_PLAIN)
def _function(func: Any, x: LNSTensor) -> LNSTensor:
    result = _tabled(x, _PLAIN[func])
    if func is aten.exp.default:
        warn_of_factors("exp", x.codes, result.codes, x.fmt)
    return result


@handles(*_SLOPES)
def _slope(func: Any, grad: LNSTensor, x: LNSTensor) -> LNSTensor:
    return _sloped(grad, x, _SLOPES[func])


@handles(aten.exp2.default)
def _exp2(func: Any, x: LNSTensor) -> LNSTensor:
    return _tabled(x, "power_of", 2.0)


@handles(aten.pow.Scalar)
def _power_of(func: Any, base: float, x: LNSTensor) -> LNSTensor:
    if base <= 0:
        raise ValueError(
            f"{base} to the power of an LNSTensor: the base must be positive, because LNS is real"
        )
    return _tabled(x, "power_of", base)


@handles(aten.pow.Tensor_Scalar)
def _pow(func: Any, x: LNSTensor, exponent: float) -> LNSTensor:
    return LNSTensor(power(x.codes, exponent, x.fmt), x.fmt)


def _check_powers(base: Tensor, exponent: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the codes of a power's base, with zero where the power is undefined.

    Raises:
        ValueError: (on a CPU) a power has no finite real value.
    """
    base, exponent = torch.broadcast_tensors(base, exponent)
    whole = exponent == exponent.round()
    undefined = ((base < 0) & ~whole) | (((base & fmt.field_mask) == 0) & (exponent < 0))
    if not undefined.is_cuda and is_real(undefined):
        if undefined.any():
            raise ValueError(
                "pow of a negative number to a fractional power, or of zero to a negative power:"
                " LNS has no NaN; clamp or mask first"
            )
        return base
    one = torch.full_like(undefined, fmt.bias, dtype=torch.int16)
    lns.div(one, one.masked_fill(undefined, 0), fmt)  # a fault on a GPU, raises in compiled code
    return torch.where(undefined, 0, base)


def power_parts(base: Tensor, exponent: Tensor, fmt: LNSFormat) -> unclamped.Unclamped:
    """Return codes raised to float64 exponents: not clamped, the logarithm rounded half to even."""
    return unclamped.raised_to_each(_check_powers(base, exponent, fmt), exponent, fmt)


def exponents_of(y: Any, fmt: LNSFormat, device: torch.device) -> Tensor:
    """Return exponents in float64: whole numbers exact, other numbers rounded to the format."""
    if isinstance(y, Tensor) and not isinstance(y, LNSTensor) and not y.is_floating_point():
        return y.to(device, torch.float64)
    one = LNSTensor(torch.full((), fmt.bias, dtype=torch.int16, device=device), fmt)
    _, codes, _ = operands("pow", one, y)
    return lns.decode(codes, fmt, torch.float64).to(device)


@handles(aten.pow.Tensor_Tensor)
def power_of_each(func: Any, x: Any, y: Any) -> LNSTensor:
    """Return ``x^y``: log x times the value of y, in float64, rounded half to even."""
    if isinstance(y, LNSTensor):
        codes, _, fmt = operands("pow", x, y)
        codes = codes.to(y.codes.device)
    else:
        codes, fmt = x.codes, x.fmt
    parts = power_parts(codes, exponents_of(y, fmt, codes.device), fmt)
    return LNSTensor(unclamped.packed(parts, fmt), fmt)


@handles(aten.pow_.Scalar)
def _pow_in_place(func: Any, x: LNSTensor, exponent: float) -> LNSTensor:
    x.codes.copy_(power(x.codes, exponent, x.fmt))
    return x


@handles(aten.pow_.Tensor)
def _pow_of_each_in_place(func: Any, x: Tensor, exponents: Any) -> Tensor:
    return x.copy_(power_of_each(func, x, exponents))


@replaces_untraced(torch.rrelu_)
def rrelu_(input: LNSTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply :func:`torch.rrelu` in place."""
    return input.copy_(torch.rrelu(input, *args, **kwargs))


@handles(aten.rsqrt.default)
def _rsqrt(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(power(x.codes, -0.5, x.fmt), x.fmt)


def _gelu_name(approximate: str) -> str:
    return "gelu" if approximate == "none" else "gelu_tanh"


@handles(aten.gelu.default)
def _gelu(func: Any, x: LNSTensor, *, approximate: str = "none") -> LNSTensor:
    return _tabled(x, _gelu_name(approximate))


@handles(aten.gelu_backward.default)
def _gelu_backward(
    func: Any, grad: LNSTensor, x: LNSTensor, *, approximate: str = "none"
) -> LNSTensor:
    return _sloped(grad, x, f"d_{_gelu_name(approximate)}")


@handles(aten.softplus.default)
def _softplus(func: Any, x: LNSTensor, beta: float = 1, threshold: float = 20) -> LNSTensor:
    return _tabled(x, "softplus", beta, threshold)


@handles(aten.softplus_backward.default)
def _softplus_backward(
    func: Any, grad: LNSTensor, x: LNSTensor, beta: float, threshold: float
) -> LNSTensor:
    return _sloped(grad, x, "d_softplus", beta, threshold)


@handles(aten.log_sigmoid_forward.default)
def _log_sigmoid(func: Any, x: LNSTensor) -> tuple[LNSTensor, Tensor]:
    return _tabled(x, "log_sigmoid"), x.codes.new_empty(0, dtype=torch.float32)


@handles(aten.log_sigmoid_backward.default)
def _log_sigmoid_backward(func: Any, grad: LNSTensor, x: LNSTensor, buffer: Tensor) -> LNSTensor:
    return _sloped(grad, x, "d_log_sigmoid")


@handles(aten.elu.default)
def _elu(
    func: Any, x: LNSTensor, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> LNSTensor:
    return _tabled(x, "elu", alpha, scale, input_scale)


@handles(aten.elu_backward.default)
def _elu_backward(
    func: Any,
    grad: Any,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    x: LNSTensor,
) -> LNSTensor:
    return _sloped(grad, x, "d_elu_of_result" if is_result else "d_elu", alpha, scale, input_scale)


@handles(aten.celu.default)
def _celu(func: Any, x: LNSTensor, alpha: float = 1) -> LNSTensor:
    return _tabled(x, "elu", alpha, 1, 1 / alpha)


@handles(aten.leaky_relu.default)
def _leaky_relu(func: Any, x: LNSTensor, negative_slope: float = 0.01) -> LNSTensor:
    codes, slope, fmt = operands("leaky_relu", x, negative_slope)
    return LNSTensor(lns.select(codes > 0, codes, lns.mul(codes, slope, fmt)), fmt)


@handles(aten.leaky_relu_backward.default)
def _leaky_relu_backward(
    func: Any, grad: LNSTensor, x: LNSTensor, negative_slope: float, is_result: bool
) -> LNSTensor:
    codes, slope, fmt = operands("leaky_relu_backward", grad, negative_slope)
    return LNSTensor(lns.select(x.codes > 0, codes, lns.mul(codes, slope, fmt)), fmt)


@handles(aten._prelu_kernel.default)
def _prelu(func: Any, x: LNSTensor, weight: LNSTensor) -> LNSTensor:
    codes, slope, fmt = operands("prelu", x, weight)
    return LNSTensor(lns.select(codes > 0, codes, lns.mul(codes, slope, fmt)), fmt)


@handles(aten._prelu_kernel_backward.default)
def _prelu_backward(
    func: Any, grad: LNSTensor, x: LNSTensor, weight: LNSTensor
) -> tuple[LNSTensor, LNSTensor]:
    fmt, positive = x.fmt, x.codes > 0
    grad_x = lns.select(positive, grad.codes, lns.mul(grad.codes, weight.codes, fmt))
    return LNSTensor(grad_x, fmt), LNSTensor(
        lns.select(~positive, lns.mul(grad.codes, x.codes, fmt), 0), fmt
    )


_DERIVATIVES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "sigmoid": ("d_sigmoid", lambda x: torch.sigmoid(x) * torch.sigmoid(-x)),
    "tanh": ("d_tanh", lambda x: 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)),
    "expm1": ("exp", torch.exp),
}
"""The derivative's table, and the derivative as differentiable operations."""


class _FromArgument(torch.autograd.Function):
    """A function by table with the derivative at its argument.

    For second derivatives, the derivative is computed with differentiable operations.
    """

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, function: str) -> LNSTensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return _tabled(x, function)

    @staticmethod
    def backward(ctx: Any, grad: LNSTensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        table, composed = _DERIVATIVES[ctx.function]
        if torch.is_grad_enabled():
            return grad * composed(x), None
        return _sloped(grad, x, table), None


@replaces(torch.sigmoid, torch.Tensor.sigmoid, torch.special.expit, F.sigmoid)
def sigmoid(input: LNSTensor) -> LNSTensor:
    """Return ``1 / (1 + e^-x)``; the derivative is computed from ``x``."""
    return _FromArgument.apply(input, "sigmoid")  # type: ignore[no-untyped-call, no-any-return]


@replaces(torch.tanh, torch.Tensor.tanh, F.tanh)
def tanh(input: LNSTensor) -> LNSTensor:
    """Return the hyperbolic tangent; the derivative is computed from the input."""
    return _FromArgument.apply(input, "tanh")  # type: ignore[no-untyped-call, no-any-return]


@replaces(torch.expm1, torch.Tensor.expm1, torch.special.expm1)
def expm1(input: LNSTensor) -> LNSTensor:
    """Return ``e^x - 1``; the derivative is computed from the input."""
    return _FromArgument.apply(input, "expm1")  # type: ignore[no-untyped-call, no-any-return]


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an in-place version of ``function`` with the out-of-place gradient."""

    def written(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.copy_(function(input.clone(), *args, **kwargs))

    return written


def _with_option(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of :mod:`torch.nn.functional` that uses :func:`_in_place` for
    ``inplace=True``. torch passes all arguments except the first by name.
    """

    def chosen(input: Tensor, inplace: bool = False, **options: Any) -> Tensor:
        with DisableTorchFunction():
            return (_in_place(function) if inplace else function)(input, **options)

    return chosen


replaces(torch.sigmoid_, torch.Tensor.sigmoid_)(_in_place(sigmoid))
replaces(torch.tanh_, torch.Tensor.tanh_)(_in_place(tanh))
replaces(torch.Tensor.expm1_)(_in_place(expm1))
replaces(F.elu_)(_in_place(F.elu))
replaces(torch.celu_)(_in_place(torch.celu))
replaces(torch.selu_)(_in_place(torch.selu))
for _activation in (F.elu, F.celu, F.selu):
    replaces(_activation)(_with_option(_activation))


@replaces(F.glu)
def glu(x: LNSTensor, dim: int = -1) -> Tensor:
    """Return ``a sigmoid(b)`` of the halves of ``x``."""
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)
