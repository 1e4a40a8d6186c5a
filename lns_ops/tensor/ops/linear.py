"""The function ``linear`` of LNSTensors as one step of the graph, forward and backward.

Left to torch, a linear layer is a product, an addition, two transpositions and as many views, each
of which comes back to LNSTensor by itself, some 25 microseconds of Python every time. Here the
forward pass and the backward pass take one step each, on codes::

    forward   y = x w^T + b
    backward  dx = dy w,   dw = dy^T x,   db = sum of dy over the examples

the same kernels on the same operands as torch's own formula, so the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import DisableTorchFunction
from lns_ops.functional.accumulation import get_matmul_accumulation
from lns_ops.tensor.lns_tensor import LNSTensor
from lns_ops.tensor.registry import replaces


class _Linear(torch.autograd.Function):
    # Shapes are those of the codes: every attribute of a tensor subclass goes through Python.

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, weight: LNSTensor, bias: LNSTensor | None) -> LNSTensor:
        ctx.save_for_backward(x, weight)
        fmt, sums, shape = x.fmt, get_matmul_accumulation(), x.codes.shape
        rows, transposed = x.codes.reshape(-1, shape[-1]), weight.codes.t()
        if bias is None:
            codes = lns.matmul(rows, transposed, fmt, accumulation=sums)
        else:
            codes = lns.linear(rows, transposed, bias.codes, fmt, accumulation=sums)
        return LNSTensor(codes if len(shape) == 2 else codes.view(*shape[:-1], -1), fmt)

    @staticmethod
    def backward(ctx: Any, grad: LNSTensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradient is to be differentiated in its turn
            rows = grad.reshape(-1, grad.shape[-1])
            return (
                grad @ weight if wanted_x else None,
                rows.t() @ x.reshape(-1, x.shape[-1]) if wanted_weight else None,
                rows.sum(0) if wanted_bias else None,
            )
        fmt, sums, inputs = grad.fmt, get_matmul_accumulation(), x.codes
        codes = grad.codes.reshape(-1, grad.codes.shape[-1])
        dx = dw = db = None
        if wanted_x:
            dx = LNSTensor(
                lns.matmul(codes, weight.codes, fmt, accumulation=sums).view(inputs.shape), fmt
            )
        if wanted_weight:
            dw = LNSTensor(
                lns.matmul(codes.t(), inputs.reshape(-1, inputs.shape[-1]), fmt, accumulation=sums),
                fmt,
            )
        if wanted_bias:
            db = LNSTensor(lns.sum(codes, [0], fmt), fmt)
        return dx, dw, db


@replaces(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``torch.nn.functional.linear``.

    Operands that torch's own formula must sort out, or refuse, are left to it.
    """
    if _plain(input, weight, bias):
        return _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call, no-any-return]
    with DisableTorchFunction():
        return F.linear(input, weight, bias)


def _plain(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether these operands are LNSTensors of one format whose shapes the fast path takes.

    They have at least two, two, and one dimensions, and fit.
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
