"""Addition, multiplication, division, signs and roots: one LNS operation each, exact or rounded
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import is_forward_mode, is_watched
from lns_ops.functional.elementwise import broadcast_shape
from lns_ops.functional.indexed import lookup
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import gradient_sums
from lns_ops.tensor.limits.decays import warn_of_average
from lns_ops.tensor.limits.underflow import warn_of_lost
from lns_ops.tensor.lns_tensor import LNSTensor, gradient, operands, write
from lns_ops.tensor.promotion import refuse_forward_mode
from lns_ops.tensor.registry import PAIRS, aten, handles, replaces

_BINARY: dict[str, Callable[[Tensor, Tensor, LNSFormat], Tensor]] = {
    "add": lns.add,
    "sub": lns.sub,
    "mul": lns.mul,
    "div": lns.div,
}
_NUMBERS = (float, int, torch.SymInt, torch.SymFloat)
"""Number types; the last two occur in traced shapes. bool is handled separately."""


def _check_broadcast(name: str, x: Tensor, y: Tensor) -> None:
    try:
        broadcast_shape(x.shape, y.shape)
    except (ValueError, RuntimeError):
        raise ValueError(
            f"{name} of shapes {tuple(x.shape)} and {tuple(y.shape)}: they do not broadcast; sizes"
            " must agree or be 1, from the last on"
        ) from None


@handles(*(getattr(getattr(aten, n), o) for n in _BINARY for o in ("Tensor", "Scalar")))
def binary(func: Any, x: Any, y: Any, alpha: Any = 1) -> LNSTensor:
    """Apply an elementwise operation to two tensors, or a tensor and a number.

    ``alpha`` multiplies ``y`` first. A number above the format's range is used exactly, with one
    exception: if a number from a traced shape is added, it saturates first.
    """
    if func is aten.add.Tensor and alpha == 1:
        gradient = gradient_sums.summed(x, y)
        if gradient is not None:
            return gradient
    name = func.overloadpacket.__name__
    if alpha != 1 and type(y) in _NUMBERS:
        y, alpha = alpha * y, 1
    if (type(y) in _NUMBERS or type(x) in _NUMBERS) and alpha == 1:
        found = _by_large_number(name, x, y)
        if found is not None:
            return found
    x_codes, y_codes, fmt = operands(name, x, y)
    if name == "mul" and type(y) is float and 0 < y < 1:
        warn_of_average(f"multiplication by {y:.6g}", 1 - y, fmt)
    if x_codes.shape != y_codes.shape:
        _check_broadcast(name, x_codes, y_codes)
    if alpha != 1:
        return LNSTensor(_with_alpha(_BINARY[name], x_codes, y_codes, alpha, fmt), fmt)
    return LNSTensor(_BINARY[name](x_codes, y_codes, fmt), fmt)


@handles(aten.add_.Tensor)
def _add_(func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    if alpha == 1 and gradient_sums.add_(x, y):
        return x
    return write(x, binary(aten.add.Tensor, x, y, alpha), "add_")


def _by_large_number(name: str, x: Any, y: Any) -> LNSTensor | None:
    """Return the result for a tensor and a Python number above the format's range.

    The number is used exactly: its logarithm is rounded as in encoding, and only the result is
    clamped. Returns None for any other number, which is encoded.
    """
    tensor, number = (x, y) if isinstance(x, LNSTensor) else (y, x)
    fmt = tensor.fmt
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        return _by_large_size(name, x, y, fmt) if name in ("mul", "div") else None
    log = lns.logarithm_beyond(number, fmt)
    if not log:
        return None
    codes = tensor.codes
    if name in ("add", "sub"):
        total = lookup(codes, "plus", fmt, number if name == "add" else -number)
        return LNSTensor(lns.neg(total, fmt) if name == "sub" and tensor is y else total, fmt)
    if name == "div" and tensor is x:
        result = lns.shifted(codes, -log, fmt)
        warn_of_lost(number, codes, result, fmt)
    else:
        if name == "div":
            codes = lns.div(lns.encode_number(1.0, fmt), codes, fmt)
        result = lns.shifted(codes, log, fmt)
    return LNSTensor(lns.neg(result, fmt) if number < 0 else result, fmt)


def _by_large_size(name: str, x: Any, y: Any, fmt: LNSFormat) -> LNSTensor | None:
    """Return the result for a number from a traced shape, split into a power of two and a rest."""
    number, octaves = (y if isinstance(x, LNSTensor) else x), fmt.most_scale
    if octaves == 1 or not number > fmt.largest:
        return None
    multiplied, operator = aten.mul.Tensor, getattr(aten, name).Tensor
    if isinstance(x, LNSTensor):
        return binary(operator, binary(operator, x, octaves), number / octaves)
    return binary(multiplied, binary(operator, octaves, y), number / octaves)


def _reduced(codes: Tensor, shape: torch.Size, fmt: LNSFormat) -> Tensor:
    """Sum a gradient over the dimensions in which its operand was broadcast, as autograd does."""
    new = codes.dim() - len(shape)
    dims = [d for d, n in enumerate(codes.shape) if d < new or shape[d - new] == 1 != n]
    return lns.sum(codes, dims, fmt).reshape(shape) if dims else codes.reshape(shape)


class _Sum(torch.autograd.Function):
    """The sum ``x + y`` or difference in one graph node, with the bits of torch's formula."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, y: LNSTensor, less: bool) -> LNSTensor:
        x_codes, y_codes, fmt = x.codes, y.codes, x.fmt
        ctx.options = fmt, x_codes.shape, y_codes.shape, less
        return LNSTensor((lns.sub if less else lns.add)(x_codes, y_codes, fmt), fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        fmt, x, y, less = ctx.options
        wanted_x, wanted_y, _ = ctx.needs_input_grad
        grad = gradient(grad, fmt)
        if torch.is_grad_enabled() or x == y:  # otherwise the engine sums broadcast dimensions
            negative = -grad if less and wanted_y else grad
            return grad if wanted_x else None, negative if wanted_y else None, None
        dx, dy, codes = grad if wanted_x else None, grad if wanted_y else None, grad.codes
        if wanted_x and codes.shape != x:
            dx = LNSTensor(_reduced(codes, x, fmt), fmt)
        if wanted_y and less:
            codes = lns.neg(codes, fmt)
        if wanted_y and (less or codes.shape != y):
            dy = LNSTensor(codes if codes.shape == y else _reduced(codes, y, fmt), fmt)
        return dx, dy, None


class _Product(torch.autograd.Function):
    """The product ``x y`` with ``dx = dz y``, ``dy = dz x``, with the bits of torch's formula."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, y: LNSTensor) -> LNSTensor:
        wanted_x, wanted_y = ctx.needs_input_grad
        ctx.save_for_backward(x if wanted_y else None, y if wanted_x else None)
        x_codes, y_codes, fmt = x.codes, y.codes, x.fmt
        ctx.options = fmt, x_codes.shape, y_codes.shape
        return LNSTensor(lns.mul(x_codes, y_codes, fmt), fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fmt, *shapes = ctx.options
        grad = gradient(grad, fmt)
        factors = reversed(ctx.saved_tensors)
        if torch.is_grad_enabled():  # the gradient itself needs a gradient (double backward)
            return tuple(None if factor is None else grad * factor for factor in factors)
        found: list[Tensor | None] = []
        for factor, shape in zip(factors, shapes, strict=True):
            if factor is None:
                found.append(None)
                continue
            codes = lns.mul(grad.codes, factor.codes, fmt)
            codes = codes if codes.shape == shape else _reduced(codes, shape, fmt)
            found.append(LNSTensor(codes, fmt))
        return tuple(found)


def in_one_node(function: Callable[..., Any], *options: Any) -> Callable[[Any, Any], Any]:
    """Return a function that applies ``function`` to two LNSTensors. It returns None for other
    arguments, and if something observes operators, so that torch reports errors and operators."""

    def apply(x: Any, y: Any) -> Any:
        if (
            type(x) is not LNSTensor
            or type(y) is not LNSTensor
            or x.fmt != y.fmt
            or is_watched()
            or is_forward_mode()
        ):
            return None
        shape_x, shape_y = x.codes.shape, y.codes.shape
        if shape_x != shape_y:
            try:
                broadcast_shape(shape_x, shape_y)
            except ValueError:
                return None
        return function(x, y, *options)

    return apply


PAIRS.update(dict.fromkeys((torch.add, Tensor.add, Tensor.__add__), in_one_node(_Sum.apply, False)))
PAIRS.update(dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), in_one_node(_Sum.apply, True)))
PAIRS.update(dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), in_one_node(_Product.apply)))


_PRIMITIVES = {getattr(torch.ops.prims, n).default: getattr(aten, n).Tensor for n in _BINARY}


@handles(*_PRIMITIVES)
def _primitive(func: Any, x: Any, y: Any) -> LNSTensor:
    """Compute torch's primitives on meta tensors, if zeros without memory are combined with LNS.

    Such zeros are the gradient of a sign, in the second derivative of ``|x|``.
    """
    refuse_forward_mode(str(func))  # forward-mode tangents are such zeros as well
    return binary(_PRIMITIVES[func], x, y)


def _with_alpha(
    operation: Callable[[Tensor, Tensor, LNSFormat], Tensor],
    x: Tensor,
    y: Tensor,
    alpha: Any,
    fmt: LNSFormat,
) -> Tensor:
    """Return ``x +- alpha y``, or ``(x / alpha +- y) alpha`` if ``alpha y`` leaves the range.

    The latter has the same ratio of terms, except that an ``x / alpha`` below the range is zero.
    """
    product = _scaled(y, alpha, fmt)
    result = operation(x, product, fmt)
    if abs(alpha) <= 1:
        return result
    beyond = lns.absolute(product, fmt) == fmt.field_mask
    part = operation(_scaled(x, alpha, fmt, -1), y, fmt)
    return torch.where(beyond, _scaled(part, alpha, fmt), result)


def _scaled(x: Tensor, alpha: Any, fmt: LNSFormat, power: int = 1) -> Tensor:
    """Return ``x alpha^power`` for a power of 1 or -1 and any ``alpha``."""
    if isinstance(alpha, (int, float)) and (log := lns.logarithm_beyond(alpha, fmt)):
        result = lns.shifted(x, power * log, fmt)
        return lns.neg(result, fmt) if alpha < 0 else result
    factor = operands("alpha", LNSTensor(x, fmt), alpha)[1]
    return (lns.mul if power == 1 else lns.div)(x, factor, fmt)


@handles(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(func: Any, *args: Any) -> NoReturn:
    raise ValueError(
        "GradScaler with LNS gradients: looks for infinities, which LNS does not have; turn it off"
        " (fp16=False, mixed_precision='no') and scale the loss by a power of two, which costs"
        " nothing in LNS: lns_ops.LossScale(128)"
    )


@handles(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(func: Any, x: LNSTensor, y: Any, alpha: Any = 1) -> LNSTensor:
    fmt = x.fmt
    if alpha != 1 and isinstance(y, (int, float)) and lns.logarithm_beyond(y, fmt):
        if abs(alpha) > 1:
            part = binary(aten.sub.Tensor, y / alpha, x).codes
            return LNSTensor(_scaled(part, alpha, fmt), fmt)
        x, alpha = LNSTensor(_scaled(x.codes, alpha, fmt), fmt), 1
    return binary(aten.sub.Tensor, y, x, alpha)


@handles(aten.reciprocal.default)
def _reciprocal(func: Any, x: LNSTensor) -> LNSTensor:
    return binary(aten.div.Tensor, 1.0, x)


@handles(aten.neg.default)
def _neg(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.neg(x.codes, x.fmt), x.fmt)


@handles(aten.abs.default)
def _abs(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.absolute(x.codes, x.fmt), x.fmt)


@handles(aten.sgn.default, aten.sign.default)
def _sign(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.sign(x.codes, x.fmt), x.fmt)


@replaces(torch.sgn, Tensor.sgn)
def sgn(input: LNSTensor) -> Tensor:
    """Return the sign; for gradients of ``sgn`` torch would use a special kind of zeros."""
    return torch.sign(input)


@handles(aten.sqrt.default)
def _sqrt(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.sqrt(x.codes, x.fmt), x.fmt)


@handles(aten.relu.default)
def _relu(func: Any, x: LNSTensor) -> LNSTensor:
    return LNSTensor(lns.relu(x.codes), x.fmt)


@handles(aten.relu_.default)
def _relu_(func: Any, x: LNSTensor) -> LNSTensor:
    x.codes.clamp_min_(0)
    return x


@handles(aten.addcmul.default)
def _addcmul(func: Any, x: LNSTensor, y: Any, z: Any, *, value: Any = 1) -> LNSTensor:
    return binary(aten.add.Tensor, x, binary(aten.mul.Tensor, y, z), value)


@handles(aten.addcdiv.default)
def _addcdiv(func: Any, x: LNSTensor, y: Any, z: Any, *, value: Any = 1) -> LNSTensor:
    return binary(aten.add.Tensor, x, binary(aten.div.Tensor, y, z), value)


@handles(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(func: Any, x: LNSTensor, y: LNSTensor, weight: Any) -> LNSTensor:
    if isinstance(weight, float):
        warn_of_average(f"lerp with a weight of {weight:.3g}", weight, x.fmt)
    return binary(
        aten.add.Tensor, x, binary(aten.mul.Tensor, binary(aten.sub.Tensor, y, x), weight)
    )
