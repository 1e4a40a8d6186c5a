"""Norms and standard deviations.

A norm squares: 0.003 leaves lns12 when squared, and 100,000 of it are 0.95. So a norm is summed in float64 and rounded once. That of a
whole tensor counts how often each magnitude occurs (:func:`lns_ops.moments.norm`) and has the same bits on every device; the others depend
on the order in which a device adds float64 numbers, which changes a code about once in 10^12 times.

Gradients at 0 are torch's: 0, though the formula divides by the norm. So they are formulas of their own, of the functions that users call;
``sqrt`` alone has an infinite one, which is refused as other divisions by zero are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import functional as lns
from lns_ops import moments
from lns_ops.handlers.reductions import dimensions
from lns_ops.tensor import LNSTensor, aten, handles, replaces


@handles(aten.linalg_vector_norm.default)
def _norm(func: Any, x: LNSTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> LNSTensor:
    dims = dimensions(x, dim)
    if ord == 2 and len(dims) == x.dim() and type(x.codes) is Tensor:
        total = moments.norm(x.codes, x.fmt).reshape([1] * (x.dim() if keepdim else 0))
    else:
        total = _summed(lns.decode(x.codes, x.fmt, torch.float64), ord, dims or None, keepdim)
    return LNSTensor(lns.encode(total.clamp(max=x.fmt.largest), x.fmt), x.fmt)


def _summed(x: Tensor, ord: float, dims: list[int] | None, keepdim: bool) -> Tensor:
    """The norm in float64, of quotients by the largest number (the smallest for negative orders), so that no power leaves float64."""
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
    """``n = (sum |x|^p)^(1/p)`` with ``dn/dx = sign(x) (|x| / n)^(p - 1)``, 0 where n is."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, p: float, dims: list[int]) -> LNSTensor:
        norm = _norm(None, x, p, dims, keepdim=True)
        ctx.save_for_backward(x, norm)
        ctx.p = p
        return norm

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, norm = ctx.saved_tensors
        sign = x.detach().sgn()
        ratio = sign * x / norm.masked_fill(norm == 0, 1.0)
        slope = sign * ratio.masked_fill(x == 0, 1.0).pow(ctx.p - 1)
        return (slope * grad).masked_fill(norm == 0, 0.0), None, None


def _torchs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


@replaces(torch.linalg.vector_norm)
def vector_norm(x: LNSTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None) -> Any:
    """``torch.linalg.vector_norm``."""
    if out is not None or ord == 0 or math.isinf(ord):
        return _torchs(torch.linalg.vector_norm, x, ord, dim, keepdim, dtype=dtype, out=out)
    dims = dimensions(x, dim)
    result: Tensor = _Norm.apply(x, float(ord), dims)  # type: ignore[no-untyped-call]
    return result if keepdim or not dims else result.squeeze(dims)


@replaces(torch.norm, torch.Tensor.norm)
def norm(input: LNSTensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None) -> Any:
    """``torch.norm`` and ``Tensor.norm``."""
    if p == "nuc":
        return _torchs(torch.norm, input, p, dim, keepdim, out, dtype)
    return vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, out=out)


@replaces(torch.linalg.norm)
def linalg_norm(
    A: LNSTensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, out: Any = None, dtype: Any = None
) -> Any:
    """``torch.linalg.norm``: matrix norms other than Frobenius' are torch's."""
    reduced = A.dim() if dim is None else len(dimensions(A, dim))
    if ord in (None, "fro") or reduced == 1:
        return vector_norm(A, 2 if ord in (None, "fro") else ord, dim, keepdim, out=out)
    return _torchs(torch.linalg.norm, A, ord, dim, keepdim, out=out, dtype=dtype)


@replaces(torch.linalg.matrix_norm)
def matrix_norm(
    A: LNSTensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None, out: Any = None
) -> Any:  # fmt: skip
    """``torch.linalg.matrix_norm``, likewise."""
    if ord == "fro":
        return vector_norm(A, 2, dim, keepdim, out=out)
    return _torchs(torch.linalg.matrix_norm, A, ord, dim, keepdim, out=out, dtype=dtype)


@replaces(F.normalize)
def normalize(input: LNSTensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """``x / max(norm, eps)``, with ``eps`` at least the format's smallest magnitude."""
    if out is not None:
        return _torchs(F.normalize, input, p, dim, eps, out)
    return input / vector_norm(input, p, dim, True).clamp_min(max(eps, input.fmt.smallest))


class _Root(torch.autograd.Function):
    """The root of a variance, whose gradient at 0 is 0."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor) -> LNSTensor:
        root = LNSTensor(lns.sqrt(x.codes, x.fmt), x.fmt)
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        zero = root == 0
        slope: Tensor = (grad / (2 * root.masked_fill(zero, 1.0))).masked_fill(zero, 0.0)
        return slope


@replaces(torch.std, torch.Tensor.std)
def std(input: LNSTensor, *args: Any, **kwargs: Any) -> Any:
    """``torch.std`` and ``Tensor.std``."""
    return _Root.apply(torch.var(input, *args, **kwargs))  # type: ignore[no-untyped-call]


@replaces(torch.std_mean)
def std_mean(input: LNSTensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
    """``torch.std_mean``."""
    variance, mean = torch.var_mean(input, *args, **kwargs)
    return _Root.apply(variance), mean  # type: ignore[no-untyped-call]
