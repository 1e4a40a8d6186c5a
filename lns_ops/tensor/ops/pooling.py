"""Pooling: maxima are exact; averages are a sum in the contract's order divided by the count.

The gradient of a maximum goes to the chosen position; several gradients for one position are summed
in the contract's order. An adaptive average is a product with a matrix of zeros and inverse counts
along each dimension, and so is its gradient. Counts may exceed the format's range, and sums are not
stored before they are divided. The gradients of overlapping windows are added in a format with a
wider range, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.functional import convolution as conv
from lns_ops.functional import unclamped
from lns_ops.functional.indexed import index_sum
from lns_ops.functional.max_pool import max_pool2d
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.limits.underflow import is_real
from lns_ops.tensor.lns_tensor import LNSTensor, in_format
from lns_ops.tensor.ops.arithmetic import binary
from lns_ops.tensor.registry import aten, handles, replaces


def _chosen(codes: Tensor, indices: Tensor, dims: int) -> Tensor:
    """Return the codes at flat spatial ``indices``."""
    picked = codes.flatten(-dims).gather(-1, indices.flatten(-dims))
    return picked.reshape(indices.shape)


@handles(aten.max_pool2d_with_indices.default)
def _max_pool2d(
    func: Any,
    x: LNSTensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[LNSTensor, Tensor]:
    size, step, pad, spread = (
        list(_full(value, 2)) for value in (kernel, stride or kernel, padding, dilation)
    )
    codes, indices = max_pool2d(x.codes, size, step, pad, spread, ceil_mode, x.fmt)
    return LNSTensor(codes, x.fmt), indices


_MAXIMA = {
    aten.max_pool3d_with_indices.default: 3, aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}  # fmt: skip


@handles(*_MAXIMA)
def _max_pool(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> tuple[LNSTensor, Tensor]:
    # float32 represents the keys exactly, and every pooling kernel of torch supports it.
    _, indices = func(lns.order_key(x.codes, x.fmt).to(torch.float32), *args, **kwargs)
    return LNSTensor(_chosen(x.codes, indices, _MAXIMA[func]), x.fmt), indices


@handles(aten.max_pool1d.default)
def _max_pool1d(
    func: Any,
    x: LNSTensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> LNSTensor:
    keys = lns.order_key(x.codes, x.fmt).to(torch.float32)
    _, indices = F.max_pool1d_with_indices(
        keys, kernel, stride or kernel, padding, dilation, ceil_mode
    )
    return LNSTensor(_chosen(x.codes, indices, 1), x.fmt)


@handles(
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default,
)  # fmt: skip
def _max_pool_backward(func: Any, grad: LNSTensor, x: LNSTensor, *args: Any) -> LNSTensor:
    indices, dims = args[-1], 3 if "3d" in func.overloadpacket.__name__ else 2
    planes = math.prod(x.shape[:-dims])
    size = math.prod(x.shape[-dims:])
    first = torch.arange(planes, device=indices.device) * size
    places = (indices.reshape(planes, math.prod(indices.shape[-dims:])) + first[:, None]).reshape(
        -1
    )
    return LNSTensor(
        index_sum(grad.codes.reshape(-1), places, planes * size, x.fmt).reshape(x.shape), x.fmt
    )


def _full(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _extra(
    size: Sequence[int], positions: Sequence[int], kernel: Any, stride: Any, padding: Any
) -> list[int]:
    """Return the extra padding at the end that ``ceil_mode`` needs."""
    each = zip(size, positions, kernel, stride, padding, strict=True)
    return [max(0, (n - 1) * s + k - length - p) for length, n, k, s, p in each]


def _counts(
    size: Sequence[int],
    positions: Sequence[int],
    kernel: Any,
    stride: Any,
    padding: Any,
    include_pad: bool,
) -> NDArray[np.float64]:
    """Return how many values each position averages, in the shape ``positions``.

    It is a NumPy array, so that the numbers are constants in compiled code.
    """
    total = np.ones(())
    for length, n, k, s, p in zip(size, positions, kernel, stride, padding, strict=True):
        starts = [i * s - p for i in range(n)]
        ends = [min(start + k, length + p) for start in starts]
        if not include_pad:
            starts, ends = [max(start, 0) for start in starts], [min(end, length) for end in ends]
        lengths = [int(end - start) for start, end in zip(starts, ends, strict=True)]
        total = total[..., None] * np.array(lengths, np.float64)
    return total


def _by_counts(x: Tensor, counts: NDArray[np.float64]) -> Tensor:
    """Return counts on the device of ``x``."""
    return torch.tensor(counts.tolist(), dtype=torch.float64, device=x.device)


def _pool_arguments(
    x: Tensor, kernel: Any, stride: Any, padding: Any, ceil: bool, dims: int
) -> tuple[Any, ...]:
    kernel, padding = _full(kernel, dims), _full(padding, dims)
    stride = _full(stride, dims) if stride not in ((), [], None) else kernel
    shape = torch.empty((1, *x.shape[-dims:]), device="meta")
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    positions = pool(shape[None], kernel, stride, padding, ceil).shape[-dims:]
    return (
        kernel,
        stride,
        padding,
        positions,
        _extra(x.shape[-dims:], positions, kernel, stride, padding),
    )


def _divided(
    codes: Tensor,
    x: Tensor,
    positions: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    include_pad: bool,
    override: Any,
    fmt: LNSFormat,
) -> Tensor:
    """Return codes ``[..., *positions]`` divided by the number of values at each position."""
    number = override
    if not number:
        counts = _counts(x.shape[-len(kernel) :], positions, kernel, stride, padding, include_pad)
        number = counts.flat[0]
        if (counts != number).any():
            return unclamped.divided(codes, _by_counts(x, counts), fmt)
    return binary(aten.div.Tensor, LNSTensor(codes, fmt), float(number)).codes  # no copy to a GPU


def _average(
    taps: Tensor, x: Tensor, positions: Any, kernel: Any, stride: Any, padding: Any,
    include_pad: bool, override: Any, fmt: LNSFormat,
) -> Tensor:  # fmt: skip
    """Return the sums of taps divided by the number of values at each position, clamped once.

    If the sum has left the range, it is the mean of all taps times their number. This is checked
    only on a CPU, because the check would wait for a GPU.
    """
    counts = _counts(x.shape[-len(kernel) :], positions, kernel, stride, padding, include_pad)
    if not override and (counts == len(taps)).all():
        return lns.mean(taps, [0], fmt)
    total = lns.sum(taps, [0], fmt)
    usual = _divided(total, x, positions, kernel, stride, padding, include_pad, override, fmt)
    beyond = (total & fmt.field_mask) == fmt.field_mask
    if taps.is_cpu and is_real(taps) and not bool(beyond.any()):
        return usual
    mean = lns.mean(taps, [0], fmt)
    wide = unclamped.scaled(unclamped.unpacked(mean, fmt), len(taps), 1, fmt)
    if override:
        wide = unclamped.scaled(wide, 1, float(override), fmt)
    else:
        wide = unclamped.over_counts(wide, _by_counts(x, counts), fmt)
    return torch.where(beyond, unclamped.packed(wide, fmt), usual)


@handles(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(
    func: Any, x: LNSTensor, kernel: Any, stride: Any = (), padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> LNSTensor:  # fmt: skip
    dims = int(func.overloadpacket.__name__[-2])
    kernel, stride, padding, positions, extra = _pool_arguments(
        x, kernel, stride, padding, ceil_mode, dims
    )
    codes = x.codes.reshape(-1, 1, *x.shape[-dims:])
    padded = conv.zero_padded(codes, padding, extra).contiguous()
    windows = conv.sliding_windows(padded, kernel, stride, [1] * dims)
    windows = windows[tuple(slice(n) for n in (*windows.shape[: 2 + dims], *positions))]
    taps = windows.movedim(list(range(2, 2 + dims)), list(range(dims))).reshape(
        math.prod(kernel), -1, *positions
    )
    options = x.codes, positions, kernel, stride, padding, count_include_pad, divisor_override
    mean = _average(taps, *options, x.fmt)
    return LNSTensor(mean.reshape(*x.shape[:-dims], *positions), x.fmt)


@handles(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _avg_pool_backward(
    func: Any, grad: LNSTensor, x: LNSTensor, kernel: Any, stride: Any, padding: Any,
    ceil_mode: bool, count_include_pad: bool, divisor_override: int | None,
) -> LNSTensor:  # fmt: skip
    dims, fmt = 3 if "3d" in func.overloadpacket.__name__ else 2, grad.fmt
    kernel, stride, padding, positions, _ = _pool_arguments(
        x, kernel, stride, padding, ceil_mode, dims
    )
    overlap = any(step < width for step, width in zip(stride, kernel, strict=True))
    codes, wide = grad.codes, fmt
    if overlap:
        codes, wide = unclamped.widened(codes, fmt), unclamped.roomiest(fmt)
    share = _divided(
        codes, x.codes, positions, kernel, stride, padding, count_include_pad, divisor_override,
        wide,
    ).reshape(-1, 1, *positions)  # fmt: skip
    if not overlap:
        return LNSTensor(_spread(share, x.shape, kernel, stride, padding), fmt)
    ones = torch.full((1, 1, *kernel), wide.bias, dtype=torch.int16, device=share.device)
    geometry = conv.Geometry(stride, padding, (1,) * dims)
    total = conv.input_gradient(share, ones, x.shape[-dims:], geometry, wide).reshape(x.shape)
    return LNSTensor(unclamped.narrowed(total, fmt), fmt)


def _spread(share: Tensor, shape: Any, kernel: Any, stride: Any, padding: Any) -> Tensor:
    """Return the gradient of windows that do not overlap: each input gets its window's, or 0.

    A sum of one term is that term, so the bits are the same as with :func:`conv.input_gradient`,
    which would visit every place of the window for every input.
    """
    codes = share
    for d, (width, step, before) in enumerate(zip(kernel, stride, padding, strict=True), start=2):
        place = torch.arange(shape[d - 2 - len(kernel)], device=share.device) + before
        window = place // step
        inside = (place % step < width) & (window < codes.shape[d])
        codes = codes.index_select(d, window.clamp(max=codes.shape[d] - 1))
        codes = codes.where(inside.reshape(-1, *[1] * (codes.dim() - 1 - d)), 0)
    return codes.reshape(shape)


def _belongs(length: int, outputs: int) -> tuple[list[list[int]], list[int]]:
    """Return the inputs of each output of an adaptive average, and their numbers."""
    spans = [range(i * length // outputs, -(-(i + 1) * length // outputs)) for i in range(outputs)]
    return [[int(j in span) for j in range(length)] for span in spans], [
        len(span) for span in spans
    ]


def adaptive_average(x: LNSTensor, output_size: Any, dims: int) -> Tensor:
    """Average nearly equal parts of each of the last ``dims`` dimensions.

    There is one part for each output; parts may overlap.
    """
    sizes = _full(output_size, dims) if isinstance(output_size, int) else tuple(output_size)
    result: Tensor = x
    for d, wanted in zip(range(-dims, 0), sizes, strict=True):
        length = x.shape[d]
        wanted = length if wanted is None else wanted
        if wanted == 1:
            result = result.mean(d, keepdim=True)
        elif wanted != length:
            matrix, counts = _belongs(length, wanted)
            if max(counts) > x.fmt.most_scale:  # its inverse may have no code
                spans = [(row.index(1), n) for row, n in zip(matrix, counts, strict=True)]
                parts = [result.narrow(d, i, n).mean(d, keepdim=True) for i, n in spans]
                result = torch.cat(parts, d)
                continue
            inverse = [-unclamped.log_of(n, x.fmt) + x.fmt.bias for n in counts]
            ones = torch.tensor(matrix, dtype=torch.int16, device=x.device).t()
            codes = ones * torch.tensor(inverse, dtype=torch.int16, device=x.device)
            result = (result.movedim(d, -1) @ LNSTensor(codes, x.fmt)).movedim(-1, d)
    return result


for _dims, _functions in {
    1: (F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d), 2: (F.adaptive_avg_pool2d,),
    3: (F.adaptive_avg_pool3d,)
}.items():  # fmt: skip

    def _adaptive_avg_pool(input: LNSTensor, output_size: Any, dims: int = _dims) -> Tensor:
        return adaptive_average(input, output_size, dims)

    replaces(*_functions)(_adaptive_avg_pool)


def _in_float64(function: Any) -> Any:
    """Return a function with squares, computed in float64 and rounded once, as norms are."""

    def computed(input: Any, *args: Any, **kwargs: Any) -> Any:
        values = function(input.to_float().double(), *args, **kwargs)
        return in_format(values, input.fmt.bits, input.fmt.fraction_bits)

    return computed


for _function in (F.local_response_norm, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d):
    replaces(_function)(_in_float64(_function))
