"""Sums, means, variances and matrix products, in the contract's order.

A sum of more than ``LONG_SUM`` terms is cut (:func:`lns_ops.functional.sum`). A mean divides by the encoded count before its sum is stored,
so it never saturates. The variance is two passes, ``mean (x - mean)^2 n / (n - correction)``: the one-pass formula subtracts numbers that
rounding has made nearly equal.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.accumulation import get_matmul_accumulation
from lns_ops.handlers.arithmetic import binary
from lns_ops.indexed import lookup
from lns_ops.reference import LONG_SUM
from lns_ops.tensor import LNSTensor, aten, handles, operands


def dimensions(x: LNSTensor, dim: Any) -> list[int]:
    dims = range(x.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return [d % x.dim() for d in dims] if x.dim() else []


def _total(x: LNSTensor, dim: Any, keepdim: bool = False) -> LNSTensor:
    return LNSTensor(lns.sum(x.codes, dimensions(x, dim), x.fmt, keepdim=keepdim), x.fmt)


@handles(aten.sum.default)
def _sum_all(func: Any, x: LNSTensor, *, dtype: Any = None) -> LNSTensor:
    return _total(x, None)


@handles(aten.sum.dim_IntList)
def _sum(func: Any, x: LNSTensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> LNSTensor:
    return _total(x, dim, keepdim)


@handles(aten.cumsum.default)
def _cumsum(func: Any, x: LNSTensor, dim: int, *, dtype: Any = None) -> LNSTensor:
    """Entry k is the sum of the first k + 1 terms, bit for bit: products with a triangle of ones, whose zeros are skipped."""
    if not x.dim() or not x.numel():
        return LNSTensor(x.codes.clone(), x.fmt)
    terms = x.codes.movedim(dim, 0)
    before: list[Tensor] = []
    parts: list[Tensor] = []
    for piece in terms.reshape(terms.shape[0], -1).split(LONG_SUM):
        triangle = torch.full((len(piece), len(piece)), x.fmt.bias, dtype=torch.int16, device=piece.device).tril()
        sums = lns.matmul(triangle, piece, x.fmt)
        whole = sums[-1:]
        if before:
            earlier = torch.stack(before).expand(-1, len(sums), -1)
            sums = lns.sum(torch.cat([earlier, sums[None]]), [0], x.fmt)
        before.append(whole)
        parts.append(sums)
    return LNSTensor(torch.cat(parts).reshape(terms.shape).movedim(0, dim).contiguous(), x.fmt)


def _count(x: LNSTensor, dim: Any) -> int:
    return math.prod(x.shape[d] for d in dimensions(x, dim))


@handles(aten.mean.default, aten.mean.dim)
def _mean(func: Any, x: LNSTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> LNSTensor:
    return LNSTensor(lns.mean(x.codes, dimensions(x, dim), x.fmt, keepdim=keepdim), x.fmt)


def _variance(x: LNSTensor, dim: Any, correction: Any, keepdim: bool) -> tuple[LNSTensor, LNSTensor]:
    count = _count(x, dim)
    mean = _mean(None, x, dim, True)
    deviation = binary(aten.sub.Tensor, x, mean)
    squares = _mean(None, binary(aten.mul.Tensor, deviation, deviation), dim, keepdim)
    freedom = count - (1 if correction is None else correction)
    if freedom <= 0:
        raise ValueError(f"a variance of {count} values, correction {correction}: LNS has no NaN; leave it out")
    variance = binary(aten.mul.Tensor, squares, count / freedom)
    return variance, mean if keepdim else LNSTensor(mean.codes.reshape(variance.shape), x.fmt)


@handles(aten.var.correction)
def _var(func: Any, x: LNSTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> LNSTensor:
    return _variance(x, dim, correction, keepdim)[0]


@handles(aten.var_mean.correction)
def _var_mean(
    func: Any, x: LNSTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[LNSTensor, LNSTensor]:
    return _variance(x, dim, correction, keepdim)


@handles(aten.std.correction)
def _std(func: Any, x: LNSTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> LNSTensor:
    variance = _variance(x, dim, correction, keepdim)[0]
    return LNSTensor(lns.sqrt(variance.codes, x.fmt), x.fmt)


@handles(aten.std_mean.correction)
def _std_mean(
    func: Any, x: LNSTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[LNSTensor, LNSTensor]:
    variance, mean = _variance(x, dim, correction, keepdim)
    return LNSTensor(lns.sqrt(variance.codes, x.fmt), x.fmt), mean


@handles(aten.logsumexp.default)
def _logsumexp(func: Any, x: LNSTensor, dim: Any, keepdim: bool = False) -> LNSTensor:
    largest = LNSTensor(_largest(x, dim), x.fmt)
    exponentials = LNSTensor(lookup(binary(aten.sub.Tensor, x, largest).codes, "exp", x.fmt), x.fmt)
    logarithm = LNSTensor(lookup(_total(exponentials, dim, True).codes, "log", x.fmt), x.fmt)
    result = binary(aten.add.Tensor, logarithm, largest)
    return result if keepdim else LNSTensor(result.codes.squeeze(dimensions(x, dim)), x.fmt)


def _largest(x: LNSTensor, dim: Any) -> Tensor:
    key = lns.order_key(x.codes, x.fmt).amax(dimensions(x, dim), keepdim=True)
    return lns.from_key(key, x.fmt)


@handles(aten.mm.default, aten.bmm.default)
def matmul(func: Any, x: Any, y: Any) -> LNSTensor:
    """The product of two matrices or two batches of them."""
    x_codes, y_codes, fmt = operands("matmul", x, y)
    return LNSTensor(lns.matmul(x_codes, y_codes, fmt, accumulation=get_matmul_accumulation()), fmt)


@handles(aten.mv.default, aten.dot.default)
def _vector(func: Any, x: LNSTensor, y: LNSTensor) -> LNSTensor:
    x_codes, y_codes, fmt = operands("matmul", x, y)
    rows = x_codes if x.dim() == 2 else x_codes[None]
    product = lns.matmul(rows, y_codes[:, None], fmt, accumulation=get_matmul_accumulation())
    return LNSTensor(product[:, 0] if x.dim() == 2 else product[0, 0], fmt)


@handles(aten.vdot.default)
def _vdot(func: Any, x: LNSTensor, y: LNSTensor) -> LNSTensor:
    return _vector(func, x, y)


@handles(aten.addmv.default, aten.addr.default, aten.addbmm.default)
def _add_product(func: Any, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> LNSTensor:
    if func is aten.addmv.default:
        product = _vector(func, x, y)
    elif func is aten.addr.default:
        product = binary(aten.mul.Tensor, LNSTensor(x.codes[:, None], x.fmt), y)
    else:
        product = _total(matmul(func, x, y), 0)
    product = _scaled(product, alpha)
    return product if beta == 0 else binary(aten.add.Tensor, _scaled(bias, beta), product)


def _scaled(x: Any, factor: Any) -> Any:
    return x if factor == 1 else binary(aten.mul.Tensor, x, factor)


@handles(aten.addmm.default, aten.baddbmm.default)
def _addmm(func: Any, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> LNSTensor:
    x_codes, y_codes, fmt = operands("addmm", x, y)
    if isinstance(bias, LNSTensor) and bias.shape == y.shape[1:] and x.dim() == 2 and beta == alpha == 1:
        bias_codes, _, _ = operands("addmm", bias, LNSTensor(x_codes, fmt))
        return LNSTensor(lns.linear(x_codes, y_codes, bias_codes, fmt, accumulation=get_matmul_accumulation()), fmt)
    product = _scaled(matmul(func, x, y), alpha)
    return product if beta == 0 else binary(aten.add.Tensor, _scaled(bias, beta), product)
