"""Convolutions and transposed convolutions with their gradients and bias.

The products are computed by :mod:`lns_ops.functional.convolution`; the bias is added as in a linear
layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.functional import convolution as conv
from lns_ops.functional.accumulation import get_matmul_accumulation
from lns_ops.functional.indexed import index_sum
from lns_ops.tensor.lns_tensor import LNSTensor, operands
from lns_ops.tensor.registry import aten, handles, replaces


def transposed_size(x: Tensor, weight: Tensor, geometry: conv.Geometry, extra: Any) -> list[int]:
    """Return the spatial size of a transposed convolution's result."""
    dims = x.dim() - 2
    extra = list(extra) * dims if len(extra) == 1 else extra
    each = zip(x.shape[2:], weight.shape[2:], *geometry[:3], extra, strict=True)
    return [(n - 1) * s - 2 * p + d * (k - 1) + 1 + e for n, k, s, p, d, e in each]


def cut(x: Tensor, size: Sequence[int]) -> Tensor:
    """Return the first positions of ``x``, ``size`` of them along each dimension.

    The gradient of a transposed convolution has more if output_padding is as long as the stride.
    """
    for dim, length in enumerate(size, start=2):
        x = x.narrow(dim, 0, length)
    return x.contiguous()


@handles(aten.convolution.default)
def _convolution(
    func: Any,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> LNSTensor:
    x_codes, w_codes, fmt = operands("convolution", x, weight)
    geometry, accumulation = (
        conv.Geometry.of(x_codes.dim() - 2, stride, padding, dilation, groups),
        get_matmul_accumulation(),
    )
    if transposed:
        size = transposed_size(x_codes, w_codes, geometry, output_padding)
        out = conv.input_gradient(x_codes, w_codes, size, geometry, fmt, accumulation=accumulation)
    else:
        out = conv.convolution(x_codes, w_codes, geometry, fmt, accumulation=accumulation)
    if bias is not None:
        bias_codes, _, _ = operands("convolution", bias, weight)
        out = lns.add(out, bias_codes.reshape(-1, *[1] * (x_codes.dim() - 2)), fmt)
    return LNSTensor(out, fmt)


@handles(aten.convolution_backward.default)
def _convolution_backward(
    func: Any, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, output_mask: Any,
) -> tuple[LNSTensor | None, LNSTensor | None, LNSTensor | None]:  # fmt: skip
    x_codes, w_codes, fmt = operands("convolution", x, weight)
    grad_codes, _, _ = operands("convolution_backward", grad, weight)
    geometry, options = (
        conv.Geometry.of(x_codes.dim() - 2, stride, padding, dilation, groups),
        {"accumulation": get_matmul_accumulation()},
    )
    grads: list[Tensor | None] = [None, None, None]
    if output_mask[0] and output_mask[1] and not transposed:
        grads[:2] = conv.gradients(grad_codes, x_codes, w_codes, geometry, fmt, **options)
    elif output_mask[0] and transposed:
        whole = conv.convolution(grad_codes, w_codes, geometry, fmt, **options)
        grads[0] = cut(whole, x_codes.shape[2:])
    elif output_mask[0]:
        size = x_codes.shape[2:]
        grads[0] = conv.input_gradient(grad_codes, w_codes, size, geometry, fmt, **options)
    if grads[1] is None and output_mask[1]:
        small, large = (x_codes, grad_codes) if transposed else (grad_codes, x_codes)
        grads[1] = conv.weight_gradient(small, large, w_codes.shape[2:], geometry, fmt, **options)
    if output_mask[2]:
        # positions, then images
        grads[2] = lns.sum(lns.sum(grad_codes, range(2, grad_codes.dim()), fmt), [0], fmt)
    first, second, third = (None if g is None else LNSTensor(g, fmt) for g in grads)
    return first, second, third


@replaces(torch.conv_tbc)
def conv_tbc(input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    """Return the convolution of sequences ``[T, B, C]`` with a weight ``[taps, C, C']``."""
    x = F.conv1d(input.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad)
    return x.permute(2, 0, 1)


def _columns(
    x: Tensor, kernel: list[int], dilation: list[int], padding: list[int], stride: list[int]
) -> Tensor:
    """Return ``F.unfold`` of codes: ``[..., C, H, W]`` to ``[..., C taps, positions]``."""
    single = x.dim() == 3
    padded = conv.zero_padded(x[None] if single else x, padding, padding).contiguous()
    windows = conv.sliding_windows(padded, kernel, stride, dilation)
    columns = windows.reshape(
        padded.shape[0], padded.shape[1] * math.prod(kernel), math.prod(windows.shape[4:])
    )
    return columns[0] if single else columns


@handles(aten.im2col.default)
def _im2col(
    func: Any, x: LNSTensor, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> LNSTensor:
    return LNSTensor(_columns(x.codes, kernel, dilation, padding, stride), x.fmt)


@handles(aten.col2im.default)
def _col2im(
    func: Any, x: LNSTensor, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> LNSTensor:
    """Return ``F.fold``: sums of overlapping values, in the contract's order."""
    taps = math.prod(kernel)
    planes = x.codes.shape[:-2].numel() * (x.shape[-2] // taps)
    places = torch.arange(1, planes * math.prod(size) + 1, device=x.codes.device).reshape(
        planes, 1, *size
    )
    columns = _columns(places, kernel, dilation, padding, stride)  # 0 in the padding
    if x.shape[-2] % taps or x.shape[-1] != columns.shape[-1]:
        raise ValueError(
            f"fold of shape {tuple(x.shape)}: must be [..., C * {taps}, {columns.shape[-1]}] for"
            f" output_size={tuple(size)} and kernel_size={tuple(kernel)}, as unfold returns it"
        )
    total = index_sum(x.codes.reshape(-1), columns.reshape(-1) - 1, places.numel(), x.fmt)
    return LNSTensor(total.reshape(*x.shape[:-2], x.shape[-2] // taps, *size), x.fmt)
