"""Convolutions whose running sums are rounded, with their gradients, in any number of dimensions.

Windows of the padded input become the columns of a matrix product, whose sums are rounded
(:mod:`lns_ops.nn.products.rounded_sums`). The terms of a sum, in order:

- forward: the channels, and for each the taps, row-major;
- gradient of the input: the output channels, and for each the taps, from the last to the first. It
  is a convolution of the gradient, with zeros inserted between its values for a stride. These zeros
  are terms like any other and count in a block of terms;
- gradient of the weight: the images of the batch, and for each the positions, row-major; one sum
  over the whole batch.

All columns of a batch are in memory at once: the size of the input times the number of taps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops._compat import reversed_padding
from lns_ops.formats import Accumulation
from lns_ops.functional.convolution import sliding_windows, zero_padded
from lns_ops.nn.products.convolutions import gradients_of
from lns_ops.nn.products.rounded_sums import rounded_product
from lns_ops.nn.products.two_forms import in_two_forms

Size = tuple[int, ...]


class _Geometry(NamedTuple):
    """The geometry of a convolution.

    ``input`` and ``kernel`` are the spatial sizes of the padded input and of the kernel.
    """

    input: Size
    kernel: Size
    stride: Size
    dilation: Size
    groups: int


def _columns(x: Tensor, geometry: _Geometry) -> tuple[Tensor, Size]:
    """Return the windows of a padded ``[N, G C, *S]`` as ``[G, N P, C T]``, and the shape of P.

    T is the number of taps, and P is the number of positions.
    """
    _, kernel, stride, dilation, groups = geometry
    windows = sliding_windows(x, kernel, stride, dilation)
    positions = tuple(windows.shape[2 + len(kernel) :])
    terms = x.shape[1] // groups * math.prod(kernel)
    split = windows.reshape(x.shape[0], groups, terms, math.prod(positions))
    return split.permute(1, 0, 3, 2).reshape(groups, -1, terms), positions


def _multiply(x_GMK: Tensor, y_GKN: Tensor, sums: Accumulation) -> Tensor:
    """Return the product of each group."""
    return torch.stack([rounded_product(x, y, sums) for x, y in zip(x_GMK, y_GKN, strict=True)])


def _output(x: Tensor, w: Tensor, geometry: _Geometry, sums: Accumulation) -> Tensor:
    """Return the convolution of a padded ``[N, G C, *S]`` by ``[G O, C, *K]``: ``[N, G O, *P]``."""
    groups, images, outputs = geometry.groups, x.shape[0], w.shape[0]
    columns, positions = _columns(x, geometry)
    w_GKO = w.reshape(groups, outputs // groups, -1).transpose(1, 2)
    out = _multiply(columns, w_GKO, sums).reshape(groups, images, -1, outputs // groups)
    return out.permute(1, 0, 3, 2).reshape(images, outputs, *positions)


def _of_input(grad: Tensor, w: Tensor, geometry: _Geometry, sums: Accumulation) -> Tensor:
    """Return the gradient of the padded input."""
    size, kernel, stride, dilation, groups = geometry
    lengths = [s * (p - 1) + 1 for p, s in zip(grad.shape[2:], stride, strict=True)]
    spread = grad.new_zeros(*grad.shape[:2], *lengths)
    places: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
    spread[places] = grad
    before = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    after = [n - length for n, length in zip(size, lengths, strict=True)]
    per_group = w.reshape(groups, -1, *w.shape[1:]).transpose(1, 2)
    turned = per_group.reshape(-1, *per_group.shape[2:]).flip(*range(2, w.dim()))
    dense = geometry._replace(stride=(1,) * len(kernel))
    return _output(zero_padded(spread, before, after), turned, dense, sums)


def _of_weight(grad: Tensor, x: Tensor, geometry: _Geometry, sums: Accumulation) -> Tensor:
    """Return the gradient of the weight from a padded input."""
    groups, (images, outputs) = geometry.groups, grad.shape[:2]
    columns, _ = _columns(x, geometry)
    rows = grad.reshape(images, groups, outputs // groups, -1).permute(1, 2, 0, 3)
    found = _multiply(rows.reshape(groups, outputs // groups, -1), columns, sums)
    return found.reshape(outputs, x.shape[1] // groups, *geometry.kernel)


_RESULTS = {"y": _output, "x": _of_input, "w": _of_weight}


class _Convolution(torch.autograd.Function):
    """A convolution of a padded input, or one of its gradients, with rounded sums.

    ``result`` selects which; see :func:`~lns_ops.nn.products.convolutions.gradients_of`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(result: str, a: Tensor, b: Tensor, geometry: _Geometry, sums: Any) -> Tensor:
        return _RESULTS[result](a.detach(), b.detach(), geometry, sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.result, a, b, ctx.geometry, ctx.sums = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        grads = [
            _convolved(wanted, p, q, ctx.geometry, ctx.sums) if needed else None
            for needed, (wanted, p, q) in zip(
                ctx.needs_input_grad[1:3], gradients_of(ctx.result, a, b, grad), strict=True
            )
        ]
        return None, *grads, None, None


_convolved = in_two_forms(_Convolution)


def convolution(
    x: Tensor, w: Tensor, stride: Size, dilation: Size, groups: int, sums: Accumulation
) -> Tensor:
    """Return torch's convolution of a padded input, with running sums rounded as in ``sums``.

    Differentiable twice.

    Args:
        x: float32 ``[N, I, *S]``.
        w: float32 ``[O, I / groups, *K]``.
        stride: a number for each dimension of ``S``.
        dilation: a number for each dimension of ``S``.
        groups: number of groups of channels.
        sums: format and blocks of the running sums.

    Returns:
        float32 ``[N, O, *P]``.

    >>> x, w = torch.ones(1, 30, 3, 3), torch.ones(1, 30, 3, 3)
    >>> convolution(x, w, (1, 1), (1, 1), 1, Accumulation(format="float(8,7)")).item()  # of 270
    256.0
    """
    geometry = _Geometry(tuple(x.shape[2:]), tuple(w.shape[2:]), stride, dilation, groups)
    return _convolved("y", x, w, geometry, sums)


class _RoundedSumsConv:
    """The common part of the layers: a torch layer with another ``forward``."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return the convolution of ``[N, I, ...]``: ``[N, O, ...]``, or both without N."""
        single = input.dim() == len(self.kernel_size) + 1
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        x = F.pad(input[None] if single else input, reversed_padding(self), mode=mode)
        sums = self.simulation.accumulation
        out = convolution(x, self.weight, self.stride, self.dilation, self.groups, sums)
        if self.bias is not None:
            out = out + self.bias.reshape(-1, *[1] * len(self.kernel_size))
        return out[0] if single else out


class RoundedSumsConv1d(_RoundedSumsConv, nn.Conv1d):
    """An nn.Conv1d with rounded sums; the bias is added in float32."""


class RoundedSumsConv2d(_RoundedSumsConv, nn.Conv2d):
    """An nn.Conv2d with rounded sums; the bias is added in float32."""


class RoundedSumsConv3d(_RoundedSumsConv, nn.Conv3d):
    """An nn.Conv3d with rounded sums; the bias is added in float32."""
