"""Exact operations that only compare: maxima, minima, clamping, sorting, selection.

A code has an integer key that is ordered like its value (:func:`lns_ops.functional.order_key`). So
torch's integer operations work on keys, and :func:`_from_key` turns keys back into codes.

An infinite limit, threshold or fill value means the largest magnitude, as in
``scores.masked_fill(mask, -inf)`` before a softmax.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.lns_tensor import LNSTensor, operands
from lns_ops.tensor.registry import aten, handles, parts_of


def _key(x: LNSTensor) -> Tensor:
    return lns.order_key(x.codes, x.fmt)


def _from_key(key: Tensor, fmt: LNSFormat) -> LNSTensor:
    return LNSTensor(lns.from_key(key, fmt), fmt)


def finite(value: Any, fmt: LNSFormat) -> Any:
    """Return ``value``, with an infinity replaced by the format's largest magnitude."""
    if isinstance(value, float) and math.isinf(value):
        return math.copysign(fmt.largest, value)
    if (
        isinstance(value, Tensor)
        and not isinstance(value, LNSTensor)
        and value.dim() == 0
        and value.dtype.is_floating_point
    ):
        return value.clamp(-fmt.largest, fmt.largest)
    return value


def _pair(name: Any, x: Any, y: Any) -> tuple[LNSTensor, LNSTensor]:
    fmt = x.fmt if isinstance(x, LNSTensor) else y.fmt
    x_codes, y_codes, fmt = operands(name, finite(x, fmt), finite(y, fmt))
    return LNSTensor(x_codes, fmt), LNSTensor(y_codes, fmt)


@handles(aten.maximum.default, aten.minimum.default, aten.fmax.default, aten.fmin.default)
def _extremum(func: Any, x: Any, y: Any) -> LNSTensor:
    x, y = _pair(func, x, y)
    return _from_key(func(_key(x), _key(y)), x.fmt)


@handles(aten.nextafter.default)
def _nextafter(func: Any, x: Any, y: Any) -> LNSTensor:
    """Return the value next to ``x`` in the direction of ``y``."""
    x, y = _pair(func, x, y)
    key, other = _key(x), _key(y)
    steps = (other > key).to(key.dtype) - (other < key).to(key.dtype)
    return _from_key(key + steps, x.fmt)


@handles(
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.hardtanh.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.clamp_min.Tensor,
    aten.clamp_max.Tensor,
)
def _clamp(
    func: Any, x: Any, first: Any = None, second: Any = None, *, min: Any = None, max: Any = None
) -> LNSTensor:
    hardtanh, upper = (
        func is aten.hardtanh.default,
        func in (aten.clamp_max.default, aten.clamp_max.Tensor),
    )
    low, high = (first, second) if not upper else (None, first)
    low, high = low if min is None else min, high if max is None else max
    if hardtanh:
        low, high = -1.0 if low is None else low, 1.0 if high is None else high
    if not isinstance(x, LNSTensor):  # integers, clamped between LNS limits
        x, _ = _pair(func, x, low if isinstance(low, LNSTensor) else high)
    key = _key(x)
    if low is not None:
        key = torch.maximum(key, _key(_pair(func, x, _inner(low, x.fmt, 1))[1]))
    if high is not None:
        key = torch.minimum(key, _key(_pair(func, x, _inner(high, x.fmt, -1))[1]))
    return _from_key(key, x.fmt)


def _inner(bound: Any, fmt: LNSFormat, inwards: int) -> Any:
    """If a bound rounds to 0, 1 or -1 and would no longer exclude it, return the next value
    ``inwards``; otherwise return the bound unchanged.

    ``clamp(max=1 - 1e-4)`` excludes 1, where the derivative of acos is infinite, and
    ``clamp(min=1e-8)`` excludes 0, where the logarithm is infinite.
    """
    if type(bound) is not float or not math.isfinite(bound):
        return bound
    code = lns.number_code(bound, fmt)
    nearest = {0: 0.0, fmt.bias: 1.0, fmt.sign_mask | fmt.bias: -1.0}.get(code)
    if nearest is None or not (nearest - bound) * inwards < 0:
        return bound
    if nearest == 0:
        return inwards * fmt.smallest
    step = 1 + fmt.epsilon
    return nearest * (step if nearest * inwards > 0 else 1 / step)


@handles(aten.hardtanh_backward.default)
def _hardtanh_backward(
    func: Any, grad: LNSTensor, x: LNSTensor, low: float, high: float
) -> LNSTensor:
    inside = (_key(x) > _key(_pair(func, x, low)[1])) & (_key(x) < _key(_pair(func, x, high)[1]))
    return LNSTensor(lns.select(inside, grad.codes, 0), grad.fmt)


@handles(aten.threshold.default)
def _threshold(func: Any, x: LNSTensor, threshold: float, value: float) -> LNSTensor:
    above = _key(x) > _key(_pair(func, x, threshold)[1])
    return LNSTensor(lns.select(above, x.codes, _pair(func, x, value)[1].codes), x.fmt)


@handles(aten.threshold_backward.default)
def _threshold_backward(func: Any, grad: LNSTensor, x: LNSTensor, threshold: float) -> LNSTensor:
    above = x.codes > 0 if threshold == 0 else _key(x) > _key(_pair(func, x, threshold)[1])
    return LNSTensor(lns.select(above, grad.codes, 0), x.fmt)


@handles(aten.where.self)
def _where(func: Any, condition: Tensor, x: Any, y: Any) -> LNSTensor:
    x, y = _pair("where", x, y)
    return LNSTensor(lns.select(condition, x.codes, y.codes), x.fmt)


@handles(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(func: Any, x: LNSTensor, mask: Tensor, value: Any) -> LNSTensor:
    x, filling = _pair("masked_fill", x, value)
    return LNSTensor(lns.select(mask, filling.codes, x.codes), x.fmt)


@handles(
    *(
        getattr(getattr(aten, n), o)
        for n in ("eq", "ne", "lt", "le", "gt", "ge")
        for o in ("Tensor", "Scalar")
    )
)
def _compare(func: Any, x: Any, y: Any) -> Tensor:
    comparison = getattr(func.overloadpacket, "Tensor")  # noqa: B009
    if isinstance(y, float) and (place := _between_keys(y, x.fmt, func)):
        return func(2 * _key(x).to(torch.int32), place)  # type: ignore[no-any-return]
    x_codes, y_codes, fmt = operands(func, x, y)
    x_key, y_key = lns.order_key(x_codes, fmt), lns.order_key(y_codes, fmt)
    return comparison(x_key, y_key)  # type: ignore[no-any-return]


def _between_keys(y: float, fmt: LNSFormat, func: Any) -> int:
    """Return the position of a number without its own code among the doubled keys, or 0.

    These are infinite numbers, and, in comparisons by size, numbers below the smallest magnitude:
    zero is less than ``1e-6``, although both have the code of zero.
    """
    by_size = func.overloadpacket.__name__ not in ("eq", "ne")
    if math.isinf(y):
        return int(math.copysign(1 << 20, y))
    underflows = by_size and 0 < abs(y) < fmt.smallest and lns.number_code(y, fmt) == 0
    return int(math.copysign(1, y)) if underflows else 0


@handles(aten.argmax.default, aten.argmin.default, aten.argsort.default, aten.argsort.stable)
def _arguments(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> Tensor:
    return func(_key(x), *args, **kwargs)  # type: ignore[no-any-return]


@handles(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def _extrema(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> LNSTensor:
    return _from_key(func(_key(x), *args, **kwargs), x.fmt)


@handles(
    aten.max.dim,
    aten.min.dim,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.kthvalue.default,
    aten.median.dim,
)
def _with_indices(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> tuple[LNSTensor, Tensor]:
    values, indices = func(_key(x), *args, **kwargs)
    return _from_key(values, x.fmt), indices


@handles(aten.aminmax.default)
def _aminmax(
    func: Any, x: LNSTensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[LNSTensor, LNSTensor]:
    smallest, largest = func(_key(x), dim=dim, keepdim=keepdim)
    return _from_key(smallest, x.fmt), _from_key(largest, x.fmt)


@handles(aten.nan_to_num.default)
def _nan_to_num(func: Any, x: LNSTensor, *args: Any) -> LNSTensor:
    """Return the values unchanged: LNS has no NaN to replace."""
    return LNSTensor(x.codes.clone(), x.fmt)


@handles(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default)
def _logical(func: Any, x: Any, y: Any) -> Tensor:
    left, right = (v.codes & v.fmt.field_mask if isinstance(v, LNSTensor) else v for v in (x, y))
    return func(left, right)  # type: ignore[no-any-return]


@handles(
    *(
        getattr(getattr(aten, f"{name}_"), operand)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for operand in ("Scalar", "Tensor")
    ),
    aten.logical_not_.default, aten.logical_and_.default, aten.logical_or_.default,
    aten.logical_xor_.default,
)  # fmt: skip
def _write_truth(func: Any, x: Tensor, *others: Any) -> Tensor:
    """Write 1 where a comparison holds and 0 elsewhere, as ``x.gt_(0)`` does."""
    return x.copy_(parts_of(func)[2](x, *others))


@handles(aten.hardshrink.default, aten.softshrink.default)
def _shrink(func: Any, x: LNSTensor, lambd: float = 0.5) -> LNSTensor:
    """Return 0 where ``|x| <= lambd``, elsewhere ``x``, or ``x`` moved towards 0 by ``lambd``."""
    beyond = (x.codes & x.fmt.field_mask) > operands(func, x, lambd)[1]
    shrunk = x.codes
    if func is aten.softshrink.default:
        limit, _, _ = operands(func, lambd, x)
        shrunk = lns.sub(x.codes, lns.select(x.codes < 0, lns.neg(limit, x.fmt), limit), x.fmt)
    return LNSTensor(lns.select(beyond, shrunk, 0), x.fmt)


@handles(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def _shrink_backward(func: Any, grad: LNSTensor, x: LNSTensor, lambd: float) -> LNSTensor:
    beyond = (x.codes & x.fmt.field_mask) > operands(func, x, lambd)[1]
    return LNSTensor(lns.select(beyond, grad.codes, 0), x.fmt)


@handles(
    aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default
)  # fmt: skip
def _never(func: Any, x: LNSTensor) -> Tensor:
    return torch.zeros_like(x.codes, dtype=torch.bool)


@handles(aten.equal.default)
def _equal(func: Any, x: Any, y: Any) -> bool:
    both = isinstance(x, LNSTensor) and isinstance(y, LNSTensor)
    return both and x.fmt == y.fmt and torch.equal(_key(x), _key(y))


@handles(
    aten.all.default,
    aten.any.default,
    aten.all.dim,
    aten.any.dim,
    aten.all.dims,
    aten.any.dims,
    aten.logical_not.default,
    aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList,
    aten.nonzero.default,
    aten.signbit.default,
)
def _truth(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> Tensor:
    return func(_key(x), *args, **kwargs)  # type: ignore[no-any-return]
