"""Linear layers and batched products of LNSTensors as one graph node, forward and backward.

With torch's own formulas, a linear layer is a product, an addition, two transpositions and as many
views, and a batched product has about fifteen views. Each of these is dispatched to LNSTensor
separately and takes about 25 microseconds of Python. Here the forward and the backward pass are one
step each, on codes::

    forward   y = x w^T + b
    backward  dx = dy w,   dw = dy^T x,   db = sum of dy over the examples

They call the same kernels on the same operands as torch's formulas, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import _compat
from lns_ops import functional as lns
from lns_ops._compat import DisableTorchFunction
from lns_ops.functional.accumulation import get_matmul_accumulation
from lns_ops.tensor.lns_tensor import LNSTensor, gradient
from lns_ops.tensor.registry import replaces


class _Linear(torch.autograd.Function):
    # Uses the shapes of the codes: every attribute access of a tensor subclass runs Python code.

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, weight: LNSTensor, bias: LNSTensor | None) -> LNSTensor:
        ctx.save_for_backward(x, weight)
        fmt, sums, shape = x.fmt, get_matmul_accumulation(), x.codes.shape
        rows, transposed = x.codes.flatten(0, -2), weight.codes.t()
        if bias is None:
            codes = lns.matmul(rows, transposed, fmt, accumulation=sums)
        else:
            codes = lns.linear(rows, transposed, bias.codes, fmt, accumulation=sums)
        return LNSTensor(
            codes if len(shape) == 2 else codes.view(*shape[:-1], codes.shape[-1]), fmt
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = gradient(grad, x.fmt)
        wanted_x, wanted_weight, wanted_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradient itself needs a gradient (double backward)
            rows = grad.flatten(0, -2)
            return (
                grad @ weight if wanted_x else None,
                rows.t() @ x.flatten(0, -2) if wanted_weight else None,
                rows.sum(0) if wanted_bias else None,
            )
        fmt, sums, inputs = grad.fmt, get_matmul_accumulation(), x.codes
        codes = grad.codes.flatten(0, -2)
        dx = dw = db = None
        if wanted_x:
            dx = LNSTensor(
                lns.matmul(codes, weight.codes, fmt, accumulation=sums).view(inputs.shape), fmt
            )
        if wanted_weight:
            dw = LNSTensor(
                lns.matmul(codes.t(), inputs.flatten(0, -2), fmt, accumulation=sums), fmt
            )
        if wanted_bias:
            db = LNSTensor(lns.sum(codes, [0], fmt), fmt)
        return dx, dw, db


class _BatchedProduct(torch.autograd.Function):
    """The batched product ``z = x y``, ``dx = dz y^T``, ``dy = x^T dz``."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, y: LNSTensor) -> LNSTensor:
        ctx.save_for_backward(x, y)
        left, right = x.codes, y.codes
        codes = lns.matmul(
            left.flatten(0, -3), right.flatten(0, -3), x.fmt, accumulation=get_matmul_accumulation()
        )
        return LNSTensor(codes.view(*left.shape[:-1], right.shape[-1]), x.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        grad = gradient(grad, x.fmt)
        wanted_x, wanted_y = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradient itself needs a gradient (double backward)
            return grad @ y.mT if wanted_x else None, x.mT @ grad if wanted_y else None
        fmt, sums, codes = grad.fmt, get_matmul_accumulation(), grad.codes.flatten(0, -3)
        dx = dy = None
        if wanted_x:
            dx = lns.matmul(codes, y.codes.flatten(0, -3).mT, fmt, accumulation=sums)
        if wanted_y:
            dy = lns.matmul(x.codes.flatten(0, -3).mT, codes, fmt, accumulation=sums)
        return tuple(  # type: ignore[return-value]
            None if found is None else LNSTensor(found.view(operand.codes.shape), fmt)
            for found, operand in ((dx, x), (dy, y))
        )


@replaces(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Return ``torch.matmul``; a batched product is one graph node."""
    if _is_sparse(input) or _is_sparse(other):
        return mm(input, other)
    if (
        isinstance(input, LNSTensor)
        and isinstance(other, LNSTensor)
        and input.fmt == other.fmt
        and input.codes.dim() > 2
        and input.codes.shape[:-2] == other.codes.shape[:-2]
        and input.codes.shape[-1] == other.codes.shape[-2]
    ):
        return _BatchedProduct.apply(input, other)  # type: ignore[no-untyped-call, no-any-return]
    with DisableTorchFunction():
        return torch.matmul(input, other)


@replaces(torch.mm, Tensor.mm, torch.spmm, torch.sparse.mm)
def mm(input: Tensor, mat2: Tensor) -> Tensor:
    """Return ``torch.mm``; for a sparse float matrix (COO, CSR) only the entries are multiplied.

    They are encoded like other float tensors that are combined with LNS, and the products of a row
    are added as by ``index_add``.
    """
    if _is_sparse(mat2):
        return mm(mat2.t(), input.t()).t()
    if not _is_sparse(input):
        with DisableTorchFunction():
            return torch.mm(input, mat2)
    entries = input.to_sparse_coo().coalesce()
    rows, columns = entries.indices()
    x = mat2 if mat2.dim() == 2 else mat2[:, None]
    terms = x[columns] * entries.values()[:, None]
    product = x.new_zeros(input.shape[0], x.shape[1]).index_add(0, rows, terms)
    return product if mat2.dim() == 2 else product[:, 0]


def _without_what_is_not_read(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function ``beta input + alpha x y`` that does not read ``input`` if beta is 0.

    In that case networks pass uninitialized memory, which may contain a NaN.
    """

    def added(input: Tensor, *factors: Any, beta: Any = 1, **others: Any) -> Tensor:
        if beta == 0 and not input.requires_grad:
            input = torch.zeros_like(input)
        with DisableTorchFunction():
            return function(input, *factors, beta=beta, **others)

    return added


for _name in ("addmm", "addmv", "addr", "addbmm", "baddbmm"):
    _function = getattr(torch, _name)
    replaces(_function, getattr(Tensor, _name))(_without_what_is_not_read(_function))


def _is_sparse(x: Tensor) -> bool:
    return type(x) is not LNSTensor and x.layout is not torch.strided


@replaces(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``torch.nn.functional.linear``.

    Operands that are not of the usual kind are left to torch's own formula.
    """
    if _plain(input, weight, bias):
        return _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call, no-any-return]
    with DisableTorchFunction():
        return F.linear(input, weight, bias)


@replaces(F.grouped_mm, _compat.grouped_mm)
def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, bias: Any = None,
    out_dtype: Any = None,
) -> Tensor:  # fmt: skip
    """Return the products of groups of rows, each with its own matrix (mixtures of experts).

    Shapes: ``mat_a`` ``[N, K]``, ``mat_b`` ``[G, K, M]``, ``offs`` ``[G]`` with the end of each
    group's rows; rows after the last group are 0. Batches ``[G, N, K]`` need no ``offs``.

    Raises:
        NotImplementedError: groups of columns, or a bias.
    """
    if bias is not None or mat_b.dim() != 3:
        raise NotImplementedError(
            "grouped_mm of LNSTensors supports groups of rows without a bias: add the bias"
            " afterwards"
        )
    if offs is None:
        return mat_a @ mat_b
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    groups = [mat_a[s:e] @ w for s, e, w in zip(starts, ends, mat_b.unbind(), strict=True) if e > s]
    rest = mat_a.new_zeros(mat_a.shape[0] - ends[-1], mat_b.shape[-1])
    return torch.cat([*groups, rest])


def _plain(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether these operands are LNSTensors of one format and fit the fast path.

    They must have at least two, two, and exactly one dimension, and matching sizes.
    """
    if not (
        isinstance(input, LNSTensor) and isinstance(weight, LNSTensor) and input.fmt == weight.fmt
    ):
        return False
    x, w = input.codes, weight.codes
    if bias is not None and not (
        isinstance(bias, LNSTensor) and bias.fmt == weight.fmt and bias.codes.shape == w.shape[:1]
    ):
        return False
    return x.dim() >= 2 and w.dim() == 2 and x.shape[-1] == w.shape[1]
