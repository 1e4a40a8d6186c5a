"""Sums, means, variances, norms and matrix products, in the contract's order.

A sum of more than ``LONG_SUM`` terms is split (:func:`lns_ops.functional.sum`). A mean divides by
the count before its sum is stored, so it never saturates. The variance is ``mean d^2 n / (n -
correction)``, where d is x with its mean subtracted twice: the mean is rounded, so the first
difference has a mean of its own. The one-pass formula would subtract numbers that rounding has made
nearly equal. The variance is stored in the format of squares
(:attr:`lns_ops.LNSFormat.of_squares`), so that a standard deviation is right in the whole range; a
variance itself saturates.

A norm squares its terms: 0.003 squared underflows in lns12, yet 100,000 such values have the norm
0.95. So norms are summed in float64 and rounded once. The norm of a whole tensor counts how often
each magnitude occurs (:func:`lns_ops.functional.norm`) and has the same bits on every device. Other
norms depend on the order in which a device adds float64 numbers, which changes a code about once in
10^12 times.

The gradient of a norm or standard deviation at 0 is 0, as in torch, although its formula divides by
the value there. So norms and ``std`` have their own gradient formulas. The gradient of plain
``sqrt`` at 0 raises, as other divisions by zero do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import index
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import weight_norm
from lns_ops.functional import reductions
from lns_ops.functional.accumulation import get_matmul_accumulation
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference import LONG_SUM
from lns_ops.tensor.lns_tensor import LNSTensor, operands
from lns_ops.tensor.ops.arithmetic import binary
from lns_ops.tensor.ops.products.chains import are_chained, chain, slope
from lns_ops.tensor.registry import aten, handles, replaces, torchs


def dimensions(x: LNSTensor, dim: Any) -> list[int]:
    """Return dimensions as nonnegative numbers; all dimensions for None and [].

    Raises:
        IndexError: a dimension does not exist.
        RuntimeError: a dimension occurs twice.
    """
    count = x.dim()
    dims = range(count) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    most = max(count, 1)  # a scalar accepts dimensions 0 and -1
    for each in dims:
        if not -most <= each < most:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but"
                f" got {each})"
            )
    if not count:
        return []
    found = [each % count for each in dims]
    if len(set(found)) < len(found):
        raise RuntimeError(f"dim appears multiple times in the list of dims {list(dims)}")
    return found


def _total(x: LNSTensor, dim: Any, keepdim: bool = False) -> LNSTensor:
    return LNSTensor(lns.sum(x.codes, dimensions(x, dim), x.fmt, keepdim=keepdim), x.fmt)


@handles(aten.sum.default)
def _sum_all(func: Any, x: LNSTensor, *, dtype: Any = None) -> LNSTensor:
    return _total(x, None)


@handles(aten.sum.dim_IntList)
def _sum(
    func: Any, x: LNSTensor, dim: Any, keepdim: bool = False, *, dtype: Any = None
) -> LNSTensor:
    return _total(x, dim, keepdim)


@handles(aten.cumsum.default)
def _cumsum(func: Any, x: LNSTensor, dim: int, *, dtype: Any = None) -> LNSTensor:
    """Return cumulative sums: entry k is the sum of the first k + 1 terms, bit for bit.

    They are products with a triangular matrix of ones; its zeros are skipped.
    """
    if not x.dim() or not x.numel():
        return LNSTensor(x.codes.clone(), x.fmt)
    terms = x.codes.movedim(dim, 0)
    before: list[Tensor] = []
    parts: list[Tensor] = []
    for piece in terms.reshape(terms.shape[0], -1).split(LONG_SUM):
        triangle = torch.full(
            (len(piece), len(piece)), x.fmt.bias, dtype=torch.int16, device=piece.device
        ).tril()
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
def _mean(
    func: Any, x: LNSTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> LNSTensor:
    return LNSTensor(lns.mean(x.codes, dimensions(x, dim), x.fmt, keepdim=keepdim), x.fmt)


def _variance(x: LNSTensor, dim: Any, correction: Any, keepdim: bool) -> tuple[Tensor, LNSTensor]:
    """Return the variance in codes of ``x.fmt.of_squares``, and the mean."""
    count, dims = _count(x, dim), dimensions(x, dim)
    mean = lns.mean(x.codes, dims, x.fmt, keepdim=True)
    rest = lns.sub(x.codes, mean, x.fmt)
    about = lns.mean(rest, dims, x.fmt, keepdim=True)
    squares = lns.mean(rest, dims, x.fmt, keepdim=keepdim, about=about)
    freedom = count - (1 if correction is None else correction)
    if freedom <= 0:
        raise ValueError(
            f"a variance of {count} values, correction {correction}: is not defined, and LNS has no"
            " NaN; leave it out"
        )
    variance = binary(aten.mul.Tensor, LNSTensor(squares, x.fmt.of_squares), count / freedom).codes
    return variance, LNSTensor(mean.reshape(variance.shape), x.fmt)


def _root(variance: Tensor, fmt: LNSFormat) -> LNSTensor:
    return LNSTensor(lns.within(lns.sqrt(variance, fmt.of_squares), fmt), fmt)


@handles(aten.var.correction)
def _var(
    func: Any, x: LNSTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> LNSTensor:
    return LNSTensor(lns.within(_variance(x, dim, correction, keepdim)[0], x.fmt), x.fmt)


@handles(aten.var_mean.correction)
def _var_mean(
    func: Any, x: LNSTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[LNSTensor, LNSTensor]:
    variance, mean = _variance(x, dim, correction, keepdim)
    return LNSTensor(lns.within(variance, x.fmt), x.fmt), mean


@handles(aten.std.correction)
def _std(
    func: Any, x: LNSTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> LNSTensor:
    return _root(_variance(x, dim, correction, keepdim)[0], x.fmt)


@handles(aten.std_mean.correction)
def _std_mean(
    func: Any, x: LNSTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[LNSTensor, LNSTensor]:
    variance, mean = _variance(x, dim, correction, keepdim)
    return _root(variance, x.fmt), mean


@handles(aten.mm.default, aten.bmm.default)
def matmul(func: Any, x: Any, y: Any) -> LNSTensor:
    """Return the product of two matrices or of two batches."""
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
def _add_product(
    func: Any, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1
) -> LNSTensor:
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
    if (
        isinstance(bias, LNSTensor)
        and bias.shape == y.shape[1:]
        and x.dim() == 2
        and beta == alpha == 1
    ):
        bias_codes, _, _ = operands("addmm", bias, LNSTensor(x_codes, fmt))
        return LNSTensor(
            lns.linear(x_codes, y_codes, bias_codes, fmt, accumulation=get_matmul_accumulation()),
            fmt,
        )
    product = _scaled(matmul(func, x, y), alpha)
    return product if beta == 0 else binary(aten.add.Tensor, _scaled(bias, beta), product)


@handles(aten.linalg_vector_norm.default)
def _norm(
    func: Any,
    x: LNSTensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> LNSTensor:
    dims = dimensions(x, dim)
    if ord == 2 and len(dims) == x.dim() and type(x.codes) is Tensor:
        total = reductions.norm(x.codes, x.fmt).reshape([1] * (x.dim() if keepdim else 0))
    else:
        total = _summed(lns.decode(x.codes, x.fmt, torch.float64), ord, dims or None, keepdim)
    return LNSTensor(lns.encode(total.clamp(max=x.fmt.largest), x.fmt), x.fmt)


def _summed(x: Tensor, ord: float, dims: list[int] | None, keepdim: bool) -> Tensor:
    """Return the norm in float64, computed from quotients so that no power leaves float64's range.

    Values are divided by the largest magnitude, or by the smallest for negative orders.
    """
    if ord == 0 or not x.numel():
        return torch.linalg.vector_norm(x, ord, dims, keepdim)  # type: ignore[no-any-return]
    extremum = (torch.amax if ord > 0 else torch.amin)(x.abs(), dims or (), keepdim=True)
    scale = torch.where(extremum == 0, 1.0, extremum)
    total: Tensor = torch.linalg.vector_norm(x / scale, ord, dims, keepdim=True) * scale
    return total if keepdim else total.squeeze(dims) if dims else total.reshape(())


@handles(aten._foreach_norm.Scalar)
def _norms(func: Any, tensors: list[LNSTensor], ord: Any = 2, dtype: Any = None) -> list[LNSTensor]:
    return [_norm(func, x, ord) for x in tensors]


class _Norm(torch.autograd.Function):
    """The norm ``n = (sum |x|^p)^(1/p)``, with ``dn/dx = sign(x) (|x| / n)^(p - 1)``, and 0 if n
    is 0.
    """

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, p: float, dims: list[int]) -> LNSTensor:
        norm = _norm(None, x, p, dims, keepdim=True)
        ctx.save_for_backward(x, norm)
        ctx.p = p
        return norm

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, norm = ctx.saved_tensors
        sign, p, zero = x.detach().sgn(), ctx.p, norm == 0
        if p >= 1 and p == round(p):
            odd = [(sign, 1.0)] if p % 2 else []  # then the power p - 1 has no sign
            powers = [(grad, 1.0), (x, p - 1), (norm, 1 - p), *odd]
            return slope(powers, x.fmt, x.shape).masked_fill(zero, 0.0), None, None
        ratio = sign * x / norm.masked_fill(norm == 0, 1.0)
        steep = sign * ratio.masked_fill(x == 0, 1.0).pow(p - 1)
        return (steep * grad).masked_fill(zero, 0.0), None, None


@replaces(torch.linalg.vector_norm)
def vector_norm(
    x: LNSTensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Return ``torch.linalg.vector_norm``."""
    if out is not None or ord == 0 or math.isinf(ord):
        return torchs(torch.linalg.vector_norm, x, ord, dim, keepdim, dtype=dtype, out=out)
    dims = dimensions(x, dim)
    result: Tensor = _Norm.apply(x, float(ord), dims)  # type: ignore[no-untyped-call]
    return result if keepdim or not dims else result.squeeze(dims)


@handles(
    aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim_dtype,
)  # fmt: skip
def _old_norm(
    func: Any, x: LNSTensor, p: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> LNSTensor:
    return _norm(func, x, 2 if p is None else p, dim, keepdim)


@replaces(weight_norm)
def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return ``g v / |v|``, the norm taken over all dimensions except ``dim`` (all for -1).

    Source: T. Salimans, D. Kingma 2016 (arXiv:1602.07868).
    """
    length = norm_except_dim(v, 2, dim)  # type: ignore[arg-type]
    if not are_chained(v, g) or not isinstance(g, LNSTensor) or not isinstance(v, LNSTensor):
        product: Tensor = v * (g / length)
        return product
    lns.div(g.codes, length.codes, v.fmt)  # raises for zero
    return chain([(v, 1.0), (g, 1.0), (length, -1.0)], v.fmt)


@replaces(torch.norm_except_dim)
def norm_except_dim(v: LNSTensor, pow: int = 2, dim: int = 0) -> Any:
    """Return the norm over all dimensions except ``dim`` (all for -1), which become size 1."""
    if dim == -1:
        return vector_norm(v, pow)
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    return vector_norm(v, pow, others, True) if others else v.abs()


@replaces(torch.norm, torch.Tensor.norm)
def norm(
    input: LNSTensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """Return ``torch.norm`` or ``Tensor.norm``."""
    if p == "nuc":
        return torchs(torch.norm, input, p, dim, keepdim, out, dtype)
    return vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, out=out)


@replaces(torch.linalg.norm)
def linalg_norm(
    A: LNSTensor,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """Return ``torch.linalg.norm``; matrix norms other than Frobenius' use torch's function."""
    reduced = A.dim() if dim is None else len(dimensions(A, dim))
    if ord in (None, "fro") or reduced == 1:
        return vector_norm(A, 2 if ord in (None, "fro") else ord, dim, keepdim, out=out)
    return torchs(torch.linalg.norm, A, ord, dim, keepdim, out=out, dtype=dtype)


@replaces(torch.linalg.matrix_norm)
def matrix_norm(
    A: LNSTensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *,
    dtype: Any = None, out: Any = None
) -> Any:  # fmt: skip
    """Return ``torch.linalg.matrix_norm``; norms other than Frobenius' use torch's function."""
    if ord == "fro":
        return vector_norm(A, 2, dim, keepdim, out=out)
    return torchs(torch.linalg.matrix_norm, A, ord, dim, keepdim, out=out, dtype=dtype)


@replaces(F.normalize)
def normalize(
    input: LNSTensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> Any:
    """Return ``x / max(norm, eps)``, with ``eps`` at least the format's smallest magnitude."""
    if out is not None:
        return torchs(F.normalize, input, p, dim, eps, out)
    return input / vector_norm(input, p, dim, True).clamp_min(max(eps, input.fmt.smallest))


def centred(x: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``x`` minus its mean, minus the remaining mean that is left by rounding."""
    for _ in range(2):
        x = x - mean(x)
    return x


class _Moment(torch.autograd.Function):
    """The variance over ``dims``, with the gradient ``2 (x - mean) / (n - correction)``."""

    @staticmethod
    def forward(
        ctx: Any, x: LNSTensor, dims: list[int], correction: float, keepdim: bool
    ) -> LNSTensor:
        ctx.save_for_backward(x)
        ctx.dims, ctx.freedom = dims, _count(x, dims) - correction
        return _var(None, x, dims, correction=correction, keepdim=keepdim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        grad = grad.reshape([1 if d in ctx.dims else n for d, n in enumerate(x.shape)])
        rest = centred(x, lambda x: x.mean(ctx.dims, keepdim=True))
        if not isinstance(ctx.freedom, (int, float)):  # a traced size
            return 2.0 / ctx.freedom * grad * rest, None, None, None
        factors = [(grad, 1.0), (rest, 1.0)]
        return slope(factors, x.fmt, x.shape, 2.0 / ctx.freedom), None, None, None


class _Deviation(torch.autograd.Function):
    """The standard deviation ``s`` over ``dims``, whose gradient is 0 if ``s`` is 0.

    The gradient, ``g (x - mean) / s / (n - correction)``, does not need the variance, which may be
    outside the format's range.
    """

    @staticmethod
    def forward(
        ctx: Any, x: LNSTensor, dims: list[int], correction: float, keepdim: bool
    ) -> LNSTensor:
        deviation = _root(_variance(x, dims, correction, keepdim)[0], x.fmt)
        ctx.save_for_backward(x, deviation)
        ctx.dims, ctx.freedom = dims, _count(x, dims) - correction
        return deviation

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, deviation = ctx.saved_tensors
        kept = [1 if d in ctx.dims else n for d, n in enumerate(x.shape)]
        grad, deviation = grad.reshape(kept), deviation.reshape(kept)
        zero, freedom = deviation == 0, ctx.freedom
        rest = centred(x, lambda x: x.mean(ctx.dims, keepdim=True))
        if isinstance(freedom, (int, float)):
            factors = [(grad, 1.0), (rest, 1.0), (deviation, -1.0)]
            found: Tensor = slope(factors, x.fmt, x.shape, over=freedom)
        else:  # a traced size
            root = freedom**0.5
            normal = rest / deviation.masked_fill(zero, 1.0)
            found = normal * (grad / root) / (freedom / root)
        return found.masked_fill(zero, 0.0), None, None, None


def _options(
    dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None,
    axis: Any = None, keepdims: bool = False,
) -> tuple[Any, float, bool]:  # fmt: skip
    """Return ``dim``, ``correction`` and ``keepdim`` from the signatures of ``std`` and ``var``.

    Dimensions are a list, or None for all.
    """
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dim = dim if axis is None else axis
    if dim is not None:
        dim = [index(d) for d in dim] if isinstance(dim, (tuple, list)) else [index(dim)]
    correction = int(unbiased) if correction is None else correction
    return dim, correction, keepdim or keepdims


def _with_own_gradient(made: Any, *functions: Any) -> Callable[..., Any]:
    """Replace torch's ``functions`` by one that uses a :class:`torch.autograd.Function`."""

    def moment(input: LNSTensor, *args: Any, **kwargs: Any) -> Any:
        dim, *options = _options(*args, **kwargs)
        return made.apply(input, dimensions(input, dim), *options)

    return replaces(*functions)(moment)


def _beside_mean(moment: Callable[..., Any], function: Any) -> None:
    """Replace a torch function that also returns the mean."""

    @replaces(function)
    def both(input: LNSTensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        dim, _, keepdim = _options(*args, **kwargs)
        mean = input.mean(dimensions(input, dim), keepdim=keepdim)
        return moment(input, *args, **kwargs), mean


_beside_mean(_with_own_gradient(_Deviation, torch.std, torch.Tensor.std), torch.std_mean)
_beside_mean(_with_own_gradient(_Moment, torch.var, torch.Tensor.var), torch.var_mean)
