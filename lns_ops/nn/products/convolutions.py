"""Convolutions and transposed convolutions in LNS on float32 tensors, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.functional import convolution as conv
from lns_ops.functional.accumulation import get_matmul_accumulation
from lns_ops.nn.products.matrices import float_input, product_form
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import promotion
from lns_ops.tensor.limits import underflow
from lns_ops.tensor.ops import convolution as transposed


def gradients_of(
    result: str, a: Tensor, b: Tensor, grad: Tensor
) -> tuple[tuple[str, Tensor, Tensor], tuple[str, Tensor, Tensor]]:
    """Return, for the gradient of each operand of a convolution, its kind and its operands.

    Args:
        result: the kind of the result, computed from ``a`` and ``b``: ``y`` from x and w, ``x``
            from y and w, or ``w`` from y and x.
        a: first operand.
        b: second operand.
        grad: gradient of the result, used in place of the result.
    """
    return {
        "y": (("x", grad, b), ("w", grad, a)),
        "x": (("y", grad, b), ("w", a, grad)),
        "w": (("y", b, grad), ("x", a, grad)),
    }[result]


class _ConvolutionMatmul(torch.autograd.Function):
    """A convolution ``y = x * w``, or one of its gradients, in LNS; float32 in and out.

    ``result`` is the one of the three that is computed from the other two: ``y`` from x and w,
    ``x`` from y and w (a transposed convolution), ``w`` from y and x. Its gradients are computed by
    the other two. ``size`` is the spatial size of the result; None for ``y``. If ``y`` is a
    gradient, it may be cropped to ``size``: if a transposed convolution's output_padding is as long
    as its stride, one more window fits.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(result: str, a: Tensor, b: Tensor, size: Any, options: Any) -> Tensor:
        geometry, fmt, accumulation = options
        with promotion.named("a convolution in LNS"):
            first, second = lns.encode(a, fmt), lns.encode(b, fmt)
        sizes = () if result == "y" else (size,)
        codes = _CONVOLUTIONS[result](
            first, second, *sizes, geometry, fmt, accumulation=accumulation
        )
        return lns.decode(codes if size is None else transposed.cut(codes, size), fmt)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.result, a, b, _, ctx.options = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        underflow.warn_of_underflow(grad, ctx.options[1])
        grads = [
            _convolved(wanted, p, q, tuple(like.shape[2:]), ctx.options) if needed else None
            for needed, like, (wanted, p, q) in zip(
                ctx.needs_input_grad[1:3], (a, b), gradients_of(ctx.result, a, b, grad), strict=True
            )
        ]
        return None, *grads, None, None


_convolved = product_form(_ConvolutionMatmul)


_CONVOLUTIONS: dict[str, Callable[..., Tensor]] = {
    "y": conv.convolution,
    "x": conv.input_gradient,
    "w": conv.weight_gradient,
}


def convolution(
    fmt: LNSFormat, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return torch's convolution ``[B, I, ...]`` to ``[B, O, ...]`` (or without B), in LNS."""
    input, dims = float_input(input), weight.dim() - 2
    single = input.dim() == dims + 1
    x = input[None] if single else input
    if isinstance(padding, str):
        x, padding = _padded(x, weight, padding, dilation), 0
    options = _options(fmt, dims, stride, padding, dilation, groups)
    out = _convolved("y", x, weight, None, options)
    if bias is not None:
        out = out + bias.reshape(-1, *[1] * dims)
    return (out[0] if single else out).to(input.dtype)


def _options(
    fmt: LNSFormat, dims: int, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[conv.Geometry, LNSFormat, str]:
    s, p, d = ([v] if isinstance(v, int) else v for v in (stride, padding, dilation))
    return conv.Geometry.of(dims, s, p, d, groups), fmt, get_matmul_accumulation()


def _padded(x: Tensor, weight: Tensor, padding: str, dilation: Any) -> Tensor:
    """Return the input padded with zeros for ``padding="same"``."""
    if padding == "valid":
        return x
    dims = weight.dim() - 2
    spread = (
        [dilation] * dims
        if isinstance(dilation, int)
        else list(dilation) * (dims if len(dilation) == 1 else 1)
    )
    amounts: list[int] = []
    for kernel, d in zip(reversed(weight.shape[2:]), reversed(spread), strict=True):
        total = d * (kernel - 1)
        amounts += [total // 2, total - total // 2]
    return F.pad(x, amounts)


def transposed_convolution(
    fmt: LNSFormat, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor:  # fmt: skip
    """Return torch's transposed convolution ``[B, O, ...]`` to ``[B, I, ...]``, in LNS."""
    input, dims = float_input(input), weight.dim() - 2
    single = input.dim() == dims + 1
    y = input[None] if single else input
    options = _options(fmt, dims, stride, padding, dilation, groups)
    extra = [output_padding] if isinstance(output_padding, int) else output_padding
    size = transposed.transposed_size(y, weight, options[0], extra)
    out = _convolved("x", y, weight, size, options)
    if bias is not None:
        out = out + bias.reshape(-1, *[1] * dims)
    return (out[0] if single else out).to(input.dtype)


def over_time(fmt: LNSFormat, input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    """Return ``torch.conv_tbc`` in LNS: sequences ``[T, B, C]``, weight ``[taps, C, C']``."""
    x, w = input.permute(1, 2, 0), weight.permute(2, 1, 0)
    return convolution(fmt, x, w, bias, padding=pad).permute(2, 0, 1)
