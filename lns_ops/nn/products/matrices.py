"""Matrix products in LNS on float32 tensors: linear layers, ``@`` and related functions.

Operands are encoded and the product's codes are decoded, so results are rounded to the format with
either accumulation. A bias is added in float32. All functions use the same two products, of
matrices and of batches. So ``x @ w.t()``, ``F.linear(x, w)`` and ``torch.addmm(b, x, w.t())`` have
the same bits, and the same gradients.

Shape suffixes: B batch, M and N rows and columns of the result, K terms of a sum; for a layer B
examples, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import is_watched
from lns_ops.functional.accumulation import get_matmul_accumulation
from lns_ops.nn.products.stepping import step_in, step_out
from lns_ops.nn.products.two_forms import in_two_forms
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import in_float32, promotion
from lns_ops.tensor.limits import underflow


def product_form(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """Return the function that calls a product and rejects forward-mode differentiation."""
    call = in_two_forms(function)

    def product(*inputs: Any) -> Tensor:
        promotion.refuse_tangents("a product in LNS", *inputs)
        entered = step_out()
        try:
            return call(*inputs)
        finally:
            step_in(entered)

    return product


class _LinearMatmul(torch.autograd.Function):
    """The product ``y = x w^T`` and both its backward products in LNS; float32 in and out.

    All three use the same accumulation.
    """

    generate_vmap_rule = True  # for torch.func.vmap and torch.func.grad around a network

    @staticmethod
    def forward(x_BI: Tensor, w_OI: Tensor, fmt: LNSFormat, accumulation: str) -> Tensor:
        with promotion.named("a product in LNS"):
            x_codes, w_codes = lns.encode(x_BI, fmt), lns.encode(w_OI, fmt)
        return lns.decode(lns.matmul(x_codes, w_codes.t(), fmt, accumulation=accumulation), fmt)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_BI, w_OI, *options = inputs
        ctx.save_for_backward(x_BI, w_OI)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, grad_BO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, w = ctx.saved_tensors
        underflow.warn_of_underflow(grad_BO, ctx.options[0])
        if not (torch.is_grad_enabled() or is_watched()):
            return *_gradients(grad_BO, x, w, ctx.needs_input_grad[:2], *ctx.options), None, None
        grad_x = _product(grad_BO, w.t(), *ctx.options) if ctx.needs_input_grad[0] else None
        grad_w = _product(grad_BO.t(), x.t(), *ctx.options) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None


_product = product_form(_LinearMatmul)


def _gradients(
    grad: Tensor, x: Tensor, w: Tensor, wanted: Sequence[bool], fmt: LNSFormat, accumulation: str
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``x`` and ``w`` of ``x w^T``, as two products.

    The incoming gradient is encoded once for both. Nothing is recorded in the graph.
    """
    entered = step_out()
    try:
        grad_x = grad_w = None
        with promotion.named("a product in LNS"):
            codes = lns.encode(grad, fmt) if wanted[0] else lns.encode(grad.mT, fmt).mT
            if wanted[0]:
                product = lns.matmul(codes, lns.encode(w, fmt), fmt, accumulation=accumulation)
                grad_x = lns.decode(product, fmt)
            if wanted[1]:
                product = lns.matmul(codes.mT, lns.encode(x, fmt), fmt, accumulation=accumulation)
                grad_w = lns.decode(product, fmt)
        return grad_x, grad_w
    finally:
        step_in(entered)


def float_input(x: Tensor) -> Tensor:
    """Return a layer's input, decoded if it is an LNSTensor.

    Raises:
        ValueError: the dtype is integer or boolean, and the result would have this dtype, too.
    """
    if not x.dtype.is_floating_point and not x.dtype.is_complex:  # encoding rejects complex values
        raise ValueError(
            f"an input of dtype {x.dtype} in a layer of scope matmul: it must have a floating"
            " dtype, as for torch's own layer; pass x.float()"
        )
    return in_float32(x)


def linear(fmt: LNSFormat, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight^T`` in LNS, plus ``bias`` in float32."""
    promotion.refuse_layout(input)
    input = float_input(input)
    flat = input.reshape(-1, input.shape[-1])
    rows = weight if weight.dim() == 2 else weight[None]
    output = _product(flat, rows, fmt, get_matmul_accumulation())
    if bias is not None:
        output = output + bias
    shape = (*input.shape[:-1], *weight.shape[:-1])
    return (output if output.shape == shape else output.reshape(shape)).to(input.dtype)


class _BatchedMatmul(torch.autograd.Function):
    """The batched product ``z = x y`` and both backward products in LNS."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BMK: Tensor, y_BKN: Tensor, fmt: LNSFormat, accumulation: str) -> Tensor:
        with promotion.named("a product in LNS"):
            x_codes, y_codes = lns.encode(x_BMK, fmt), lns.encode(y_BKN, fmt)
        return lns.decode(lns.matmul(x_codes, y_codes, fmt, accumulation=accumulation), fmt)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_BMK, y_BKN, *options = inputs
        ctx.save_for_backward(x_BMK, y_BKN)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, grad_BMN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, y = ctx.saved_tensors
        underflow.warn_of_underflow(grad_BMN, ctx.options[0])
        grad_x = _batched(grad_BMN, y.mT, *ctx.options) if ctx.needs_input_grad[0] else None
        grad_y = _batched(x.mT, grad_BMN, *ctx.options) if ctx.needs_input_grad[1] else None
        return grad_x, grad_y, None, None


_batched = product_form(_BatchedMatmul)


def matmul(fmt: LNSFormat, input: Tensor, other: Tensor) -> Tensor:
    """Return ``torch.matmul(input, other)`` in LNS, for tensors with at least one dimension.

    A batch times a single matrix is one product with all rows of the batch, as in a linear layer.
    """
    x = input[None] if input.dim() == 1 else input
    y = other[:, None] if other.dim() == 1 else other
    out = _of_matrices(fmt, x, y)
    if input.dim() == 1:
        out = out.squeeze(-2)
    return out.squeeze(-1) if other.dim() == 1 else out


def _of_matrices(fmt: LNSFormat, x: Tensor, y: Tensor) -> Tensor:
    """Return ``x @ y``, ``[..., M, K]`` and ``[..., K, N]``."""
    if y.dim() == 2:
        flat = _product(x.flatten(0, -2), y.t(), fmt, get_matmul_accumulation())
        return flat.reshape(*x.shape[:-1], flat.shape[-1]) if x.dim() != 2 else flat
    if x.dim() == 2:
        return _of_matrices(fmt, y.mT, x.t()).mT
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = (each.expand(*batch, *each.shape[-2:]).flatten(0, -3) for each in (x, y))
    out = _batched(x, y, fmt, get_matmul_accumulation())
    return out.reshape(*batch, *out.shape[1:])


def added(
    fmt: LNSFormat, input: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """Return ``beta input + alpha x @ y``: the product in LNS, the rest in float32.

    As in torch, ``input`` is not read if ``beta`` is 0.
    """
    out = matmul(fmt, x, y)
    out = out if alpha == 1 else alpha * out
    if beta == 0:
        return out
    return (input if beta == 1 else beta * input) + out


def added_batch(fmt: LNSFormat, input: Tensor, x: Tensor, y: Tensor, **factors: Any) -> Tensor:
    """Return ``torch.addbmm``, which sums over the batch: ``[B, M, K]``, ``[B, K, N]`` to
    ``[M, N]``."""
    return added(fmt, input, x.transpose(0, 1).flatten(1), y.flatten(0, 1), **factors)


def tensordot(fmt: LNSFormat, a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Return ``torch.tensordot(a, b, dims)`` in LNS."""
    dims = dims.tolist() if isinstance(dims, Tensor) else dims
    if isinstance(dims, int):
        dims = range(a.dim() - dims, a.dim()), range(dims)
    of_a, of_b = ([d % x.dim() for d in each] for x, each in zip((a, b), dims, strict=True))
    free_a = [d for d in range(a.dim()) if d not in of_a]
    free_b = [d for d in range(b.dim()) if d not in of_b]
    terms = math.prod(a.shape[d] for d in of_a)
    x = a.permute(*free_a, *of_a).reshape(math.prod(a.shape[d] for d in free_a), terms)
    y = b.permute(*free_b, *of_b).reshape(math.prod(b.shape[d] for d in free_b), terms)
    out = _product(x, y, fmt, get_matmul_accumulation())
    return out.reshape(*(a.shape[d] for d in free_a), *(b.shape[d] for d in free_b))


def inner(fmt: LNSFormat, input: Tensor, other: Tensor) -> Tensor:
    """Return ``torch.inner``: sums over the last dimension of both."""
    return tensordot(fmt, input, other, ([-1], [-1]))


def grouped(fmt: LNSFormat, x: Tensor, y: Tensor, offs: Tensor | None = None) -> Tensor:
    """Return the products of groups of rows, each with its own matrix (mixtures of experts).

    Shapes: ``x`` ``[N, K]``, ``y`` ``[G, K, M]``, ``offs`` ``[G]`` with the end of each group's
    rows; rows after the last group are 0. Batches ``[G, N, K]`` need no ``offs``.
    """
    if offs is None:
        return _of_matrices(fmt, x, y)
    ends = offs.tolist()
    groups = [
        _of_matrices(fmt, x[start:end], w)
        for start, end, w in zip([0, *ends[:-1]], ends, y.unbind(), strict=True)
        if end > start
    ]
    return torch.cat([*groups, x.new_zeros(x.shape[0] - ends[-1], y.shape[-1])])
