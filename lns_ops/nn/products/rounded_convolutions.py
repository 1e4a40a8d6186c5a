"""Convolutions whose running sums are rounded, with their gradients, in any number of dimensions.

Windows of the padded input become the columns of a matrix product, whose sums are rounded
(:mod:`lns_ops.nn.products.rounded_sums`). The terms of a sum, in order:

- forward: the channels, and for each the taps, row-major;
- gradient of the input: the output channels, and for each the taps, from the last to the first. It
  is a convolution of the gradient with zeros between its values for a stride; such a zero is a term
  like any other, so it counts in a block of terms;
- gradient of the weight: the images of the batch, and for each the positions, row-major: one sum of
  the whole batch.

All columns of a batch are in memory at a time: as many numbers as the input has, times the taps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops._compat import reversed_padding
from lns_ops.formats import Accumulation
from lns_ops.nn.products.rounded_sums import rounded_product
from lns_ops.nn.products.two_forms import in_two_forms

Size = tuple[int, ...]


class _Geometry(NamedTuple):
    """A convolution without its tensors.

    ``input`` and ``kernel`` are the spatial sizes of the padded input and of the kernel.
    """

    input: Size
    kernel: Size
    stride: Size
    dilation: Size
    groups: int

    @property
    def output(self) -> Size:
        """The spatial size of the output."""
        zipped = zip(self.input, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zipped)


def _columns(x: Tensor, kernel: Size, stride: Size, dilation: Size, groups: int) -> Tensor:
    """Return the windows of ``[N, G C, *S]``: ``[G, N P, C T]`` for P positions and T taps."""
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    dims = len(kernel)
    positions = x.shape[2 : 2 + dims]
    images, channels = x.shape[0], x.shape[1] // groups
    split = x.reshape(images, groups, channels, math.prod(positions), math.prod(kernel))
    rows = images * math.prod(positions)
    return split.permute(1, 0, 3, 2, 4).reshape(groups, rows, channels * math.prod(kernel))


def _multiply(x_GMK: Tensor, y_GKN: Tensor, sums: Accumulation) -> Tensor:
    """Return the product of each group."""
    return torch.stack([rounded_product(x, y, sums) for x, y in zip(x_GMK, y_GKN, strict=True)])


def _output(x: Tensor, w: Tensor, geometry: _Geometry, sums: Accumulation) -> Tensor:
    """Return the convolution of a padded ``[N, G C, *S]`` by ``[G O, C, *K]``: ``[N, G O, *P]``."""
    _, kernel, stride, dilation, groups = geometry
    columns = _columns(x, kernel, stride, dilation, groups)
    w_GKO = w.reshape(groups, w.shape[0] // groups, -1).transpose(1, 2)
    out = _multiply(columns, w_GKO, sums)
    out = out.reshape(groups, x.shape[0], -1, w.shape[0] // groups)
    return out.permute(1, 0, 3, 2).reshape(x.shape[0], w.shape[0], *geometry.output)


def _of_input(grad: Tensor, w: Tensor, geometry: _Geometry, sums: Accumulation) -> Tensor:
    """Return the gradient of the padded input."""
    size, kernel, stride, dilation, groups = geometry
    sizes = (s * (p - 1) + 1 for p, s in zip(geometry.output, stride, strict=True))
    spread = grad.new_zeros(*grad.shape[:2], *sizes)
    places: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
    spread[places] = grad
    amounts: list[int] = []
    for n, k, d, length in zip(
        reversed(size),
        reversed(kernel),
        reversed(dilation),
        reversed(spread.shape[2:]),
        strict=True,
    ):
        amounts += [d * (k - 1), n - length]
    dims = range(2, w.dim())
    per_group = w.reshape(groups, -1, *w.shape[1:]).transpose(1, 2)
    turned = per_group.reshape(-1, *per_group.shape[2:]).flip(*dims)
    ones = (1,) * len(kernel)
    padded = F.pad(spread, amounts)
    inner = _Geometry(tuple(padded.shape[2:]), kernel, ones, dilation, groups)
    return _output(padded, turned, inner, sums)


def _of_weight(grad: Tensor, x: Tensor, geometry: _Geometry, sums: Accumulation) -> Tensor:
    """Return the gradient of the weight from a padded input."""
    _, kernel, stride, dilation, groups = geometry
    columns = _columns(x, kernel, stride, dilation, groups)
    images, outputs = grad.shape[0], grad.shape[1] // groups
    rows = grad.reshape(images, groups, outputs, -1).permute(1, 2, 0, 3)
    found = _multiply(rows.reshape(groups, outputs, -1), columns, sums)
    return found.reshape(grad.shape[1], x.shape[1] // groups, *kernel)


_RESULTS = {"y": _output, "x": _of_input, "w": _of_weight}
_OPERANDS = {
    "y": (("x", "grad", "b"), ("w", "grad", "a")),
    "x": (("y", "grad", "b"), ("w", "a", "grad")),
    "w": (("y", "b", "grad"), ("x", "a", "grad")),
}
"""What the gradients of both operands are computed from. The operands of a result: ``y`` from x and
w, ``x`` from y and w, ``w`` from y and x."""


class _Convolution(torch.autograd.Function):
    """A convolution of a padded input, or one of its gradients, with rounded sums."""

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
        given = {"a": a, "b": b, "grad": grad}
        grads = [
            _convolved(wanted, given[p], given[q], ctx.geometry, ctx.sums) if needed else None
            for needed, (wanted, p, q) in zip(
                ctx.needs_input_grad[1:3], _OPERANDS[ctx.result], strict=True
            )
        ]
        return None, *grads, None, None


_convolved = in_two_forms(_Convolution)


def convolution(
    x: Tensor, w: Tensor, stride: Size, dilation: Size, groups: int, sums: Accumulation
) -> Tensor:
    """Return torch's convolution of a padded input, with sums rounded as ``sums`` says.

    Differentiable, also twice.

    Args:
        x: float32 ``[N, I, *S]``.
        w: float32 ``[O, I / groups, *K]``.
        stride: a number for each dimension of ``S``.
        dilation: the same.
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
