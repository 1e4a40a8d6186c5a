"""Convolutions of codes with float32 sums; :mod:`lns_ops.functional.accumulation` has the error
bounds.

Codes are decoded, convolved and encoded, without columns: torch's own convolution (oneDNN, cuDNN)
computes the sums. On a GPU one kernel decodes both operands into float32 values that tf32 can
represent (f <= 9; with bfloat16, cuDNN would round the sums to it). cuDNN convolves with
deterministic algorithms. Then one kernel encodes the sums, and recomputes those outside float32's
range.

:class:`Sums` describes one of three convolution sums (output, input gradient, weight gradient);
:mod:`lns_ops.functional.convolution` has the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lns_ops import cpu
from lns_ops.cuda import runtime
from lns_ops.cuda.float32_matmul import (
    decoded_operands,
    float32_kernel,
    float32_precision,
    operand_type,
    without_autocast,
)
from lns_ops.spec.format import LNSFormat, NonFiniteError

_LARGEST = torch.finfo(torch.float32).max
_KINDS = ("output", "input gradient", "weight gradient")


class Sums(NamedTuple):
    """The sums of a convolution: their kind, the operands' codes, the result's shape, the geometry.

    The operands are image and weight, or gradient and weight, or gradient and image.
    """

    kind: str
    left: Tensor
    right: Tensor
    shape: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the sums of the operands' values, in the operands' dtype."""
        aten, none = torch.ops.aten, [0] * len(self.stride)
        convolved: Callable[..., Tensor] = aten.convolution.default
        geometry = (self.stride, self.padding, self.dilation, False, none, self.groups)
        if self.kind == "output":
            return convolved(left, right, None, *geometry)
        wanted = left.new_empty(1).expand(self.shape)  # torch only reads its shape
        operands, place = ((wanted, right), 0) if "input" in self.kind else ((right, wanted), 1)
        mask = [place == 0, place == 1, False]
        found = aten.convolution_backward.default(left, *operands, None, *geometry, mask)
        return found[place]  # type: ignore[no-any-return]


def convolution_cpu(sums: Sums, bits: int, fraction_bits: int) -> Tensor:
    """Return the codes of the sums."""
    fmt = LNSFormat(bits, fraction_bits)

    def taken(dtype: type[np.floating[Any]]) -> Tensor:
        codes = (sums.left.contiguous(), sums.right.contiguous())
        left, right = (torch.from_numpy(cpu.decode(c.numpy(), fmt, dtype)) for c in codes)
        with without_autocast(sums.left):
            return sums.of(left, right).contiguous()

    values = taken(np.float32)
    try:
        return torch.from_numpy(cpu.encode(values.numpy(), fmt))
    except NonFiniteError:
        wide = taken(np.float64).clamp(-_LARGEST, _LARGEST).to(torch.float32)
        repaired = torch.where(values.isfinite(), values, wide)
        return torch.from_numpy(cpu.encode(repaired.numpy(), fmt))


@contextmanager
def _deterministic(kind: str) -> Iterator[None]:
    """Make cuDNN multiply in the precision ``kind``, with deterministic algorithms."""
    cudnn = torch.backends.cudnn
    precision = "tf32" if kind == "tf32" else "ieee"
    with float32_precision(cudnn.conv, precision):  # type: ignore[attr-defined]
        before = cudnn.deterministic, cudnn.benchmark
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield
        finally:
            cudnn.deterministic, cudnn.benchmark = before


def _sizes(sums: Sums) -> list[int]:
    """Return the integers of ``Convolution`` in ``float32.cu``, which follow its pointers."""
    left, right, shape = sums.left.shape, sums.right.shape, sums.shape
    image, weight, output = {
        "output": (left, right, shape),
        "input gradient": (shape, right, left),
        "weight gradient": (right, shape, left),
    }[sums.kind]
    every = (image[2:], weight[2:], output[2:], sums.stride, sums.padding, sums.dilation)
    missing, outputs = 3 - len(sums.stride), weight[0] // sums.groups
    dims = [
        size
        for sizes, neutral in zip(every, (1, 1, 1, 1, 0, 1), strict=True)
        for size in (*[neutral] * missing, *sizes)
    ]
    return [_KINDS.index(sums.kind), image[0], sums.groups, weight[1], outputs, *dims]


def convolution_cuda(sums: Sums, bits: int, fraction_bits: int) -> Tensor:
    """Return the codes of the sums; it takes two launches in addition to cuDNN's."""
    sums = sums._replace(left=sums.left.contiguous(), right=sums.right.contiguous())
    kind = _multiplied(fraction_bits)
    left, right = decoded_operands(sums.left, sums.right, bits, fraction_bits, kind)
    with without_autocast(left), _deterministic(kind):
        values = sums.of(left, right).contiguous()
    return _encoded(values, sums, bits, fraction_bits)


def _multiplied(fraction_bits: int) -> str:
    """Return the type in which cuDNN multiplies codes."""
    kind = operand_type(fraction_bits)
    return "tf32" if kind == "bf16" else kind


def _encoded(values: Tensor, sums: Sums, bits: int, fraction_bits: int) -> Tensor:
    """Return the codes of float32 sums on a GPU, recomputing those outside float32's range."""
    out, device = torch.empty_like(values, dtype=torch.int16), values.get_device()
    tables = runtime.device_tables(fraction_bits, device)
    kernel = float32_kernel("encode_convolution", bits, fraction_bits, device)
    kernel(
        runtime.grid_of(out.numel(), device, per_thread=4, kernel=kernel), runtime.THREADS, device,
        values.data_ptr(), out.data_ptr(), out.numel(), tables.cells.data_ptr(),
        sums.left.data_ptr(), sums.right.data_ptr(), tables.significands_double.data_ptr(),
        *_sizes(sums),
    )  # fmt: skip
    return out


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, bits: int, fraction_bits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the codes of the gradients of input and weight; the operands are decoded only once.

    The bits are the same as with :func:`convolution` for each gradient.
    """
    grad, x, weight = (codes.contiguous() for codes in (grad, x, weight))
    geometry = (stride, padding, dilation, groups)
    of_x = Sums("input gradient", grad, weight, x.shape, *geometry)
    of_weight = Sums("weight gradient", grad, x, weight.shape, *geometry)
    if 0 in (grad.numel(), x.numel(), weight.numel()):
        return convolution(of_x, bits, fraction_bits), convolution(of_weight, bits, fraction_bits)
    fmt = LNSFormat(bits, fraction_bits)
    if grad.is_cuda:
        kind = _multiplied(fraction_bits)
        g, image = decoded_operands(grad, x, bits, fraction_bits, kind)
        kernel, _ = decoded_operands(weight, weight[:0], bits, fraction_bits, kind)
        context: AbstractContextManager[None] = _deterministic(kind)
    else:
        g, image, kernel = (
            torch.from_numpy(cpu.decode(codes.numpy(), fmt, np.float32))
            for codes in (grad, x, weight)
        )
        context = nullcontext()
    with without_autocast(g), context:
        found = torch.ops.aten.convolution_backward.default(
            g, image, kernel, None, stride, padding, dilation, False, [0] * len(stride), groups,
            [True, True, False],
        )  # fmt: skip
    first, second = (
        _codes_of(values.contiguous(), sums, bits, fraction_bits)
        for values, sums in zip(found[:2], (of_x, of_weight), strict=True)
    )
    return first, second


def _codes_of(values: Tensor, sums: Sums, bits: int, fraction_bits: int) -> Tensor:
    """Return the codes of float32 sums."""
    if values.is_cuda:
        return _encoded(values, sums, bits, fraction_bits)
    try:
        return torch.from_numpy(cpu.encode(values.numpy(), LNSFormat(bits, fraction_bits)))
    except NonFiniteError:
        return convolution_cpu(sums, bits, fraction_bits)


def convolution(sums: Sums, bits: int, fraction_bits: int) -> Tensor:
    """Return the codes of the sums, int16 with the sums' shape."""
    if math.prod(sums.shape) == 0 or 0 in (sums.left.numel(), sums.right.numel()):
        return sums.left.new_zeros(list(sums.shape))
    return (convolution_cuda if sums.left.is_cuda else convolution_cpu)(sums, bits, fraction_bits)
