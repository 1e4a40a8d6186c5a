"""Convolutions of codes and their gradients in one, two or three dimensions, by implicit GEMM.

Windows of the padded input are gathered into columns (zero is code 0, so torch's own padding
works), and each output is one sum of a matrix product in the contract's order. The sums and their
orders are:

- forward, ``out[n, o, p] = sum w[o, c, t] x[n, c, stride p + dilation t - padding]``: over (c, t),
  the channel slowest, t row-major;
- gradient of the input: over (o, t), t from the last tap to the first, that is by ascending
  position in the gradient. With a stride, each residue of the position uses only the taps that
  reach it, so no zeros are multiplied. This is also the transposed convolution;
- gradient of the bias: over the positions of each image, then over images;
- gradient of the weight: over (n, p) in pieces of whole images. A piece has as many images (at
  least one) as have ``LONG_SUM = 4096`` positions together. The pieces are then added as in
  :func:`lns_ops.functional.sum`. A single sum over all positions of a batch would be too long.

Sums of more than 4,096 products, over channels and taps or over the positions of one image, are
split as in :func:`lns_ops.functional.matmul`.

With ``accumulation="float32"`` the same terms are added in linear arithmetic, in an order that
torch's convolutions choose (:mod:`lns_ops.functional.float32_convolution`).

Columns are computed for a few images at a time, so they take a few megabytes for any batch size;
results do not depend on it. The columns are the vector operand of the product and the weights the
scalar one, because there are few weights and many positions.

Shape suffixes: N images, G groups, C channels of a group, O outputs of a group, K = C times the
taps, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product as combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lns_ops.functional.accumulation import check_accumulation
from lns_ops.functional.float32_convolution import Sums
from lns_ops.functional.float32_convolution import convolution as float32_convolution
from lns_ops.functional.float32_convolution import gradients as float32_gradients
from lns_ops.functional.library import (
    FORMAT,
    cached_format,
    define_operator,
    kernels_of,
    operators_for,
)
from lns_ops.functional.reductions import product, reduced
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference import LONG_SUM

_COLUMNS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Approximate number of elements of the columns that are computed at a time."""


class Geometry(NamedTuple):
    """Stride, padding and dilation of each spatial dimension, and the number of groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @staticmethod
    def of(
        dims: int,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int = 1,
    ) -> Geometry:
        """Return the geometry for ``dims`` dimensions.

        Each sequence has ``dims`` numbers, or one for all dimensions.
        """
        every = [tuple(v) * dims if len(v) == 1 else tuple(v) for v in (stride, padding, dilation)]
        return Geometry(every[0], every[1], every[2], groups)

    def output_size(self, size: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Return the number of positions along each dimension for this input and kernel size."""
        ends = zip(size, kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(s + 2 * p - d * (k - 1) - 1) // t + 1 for s, k, t, p, d in ends]


def sliding_windows(
    x_NCS: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return a view ``[N, C, *kernel, *positions]`` with the input of each tap at each position."""
    given = (x_NCS.shape, x_NCS.stride(), tuple(kernel), tuple(stride), tuple(dilation))
    try:
        shape, strides = _cached_windows(*given)
    except TypeError:  # symbolic sizes have no hash
        shape, strides = _windows(*given)
    return x_NCS.as_strided(shape, strides, x_NCS.storage_offset())


def _windows(
    sizes: tuple[int, ...], strides: tuple[int, ...], kernel: tuple[int, ...],
    stride: tuple[int, ...], dilation: tuple[int, ...],
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Return shape and strides of :func:`sliding_windows`."""
    dims = list(zip(strides[2:], sizes[2:], kernel, stride, dilation, strict=True))
    positions = [(size - d * (k - 1) - 1) // t + 1 for _, size, k, t, d in dims]
    steps = [*(s * d for s, _, _, _, d in dims), *(s * t for s, _, _, t, _ in dims)]
    return [*sizes[:2], *kernel, *positions], [*strides[:2], *steps]


_cached_windows = lru_cache(maxsize=4096)(_windows)


def zero_padded(x_NCS: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    if not (any(before) or any(after)):
        return x_NCS
    pairs = zip(reversed(before), reversed(after), strict=True)
    return torch.constant_pad_nd(x_NCS, [amount for pair in pairs for amount in pair])


def _correlate(
    x_NCS: Tensor, w_GOK: Tensor, kernel: Sequence[int], stride: Sequence[int],
    dilation: Sequence[int], bits: int, fraction_bits: int,
) -> Tensor:  # fmt: skip
    """Return the sums ``[N, G O, *positions]`` of a padded input and weights.

    Shapes: input ``[N, G C, *S]``, weights ``[G, O, C taps]``.
    """
    windows = sliding_windows(x_NCS, kernel, stride, dilation)
    (n, channels), positions, (groups, outputs, K) = (
        windows.shape[:2],
        windows.shape[2 + len(kernel) :],
        w_GOK.shape,
    )
    P, ops, fmt = math.prod(positions), kernels_of(x_NCS), cached_format(bits, fraction_bits)

    def sums(some: Tensor) -> Tensor:
        columns = some.movedim(0, 1 + len(kernel)).reshape(groups, K, -1)
        made = product(ops, w_GOK, columns, fmt)
        return made.reshape(groups, outputs, -1, P).permute(2, 0, 1, 3)

    step = max(1, _COLUMNS[x_NCS.device.type] // max(1, channels * math.prod(kernel) * P))
    if step >= n:
        return sums(windows).reshape(n, groups * outputs, *positions).contiguous()
    out = x_NCS.new_empty((n, groups, outputs, P))
    for first in range(0, n, step):
        out[first : first + step] = sums(windows[first : first + step])
    return out.reshape(n, groups * outputs, *positions)


def _forward(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, accumulation: str, bits: int, fraction_bits: int,
) -> Tensor:  # fmt: skip
    if accumulation == "float32":
        geometry = Geometry.of(x.dim() - 2, stride, padding, dilation)
        shape = (x.shape[0], weight.shape[0], *geometry.output_size(x.shape[2:], weight.shape[2:]))
        sums = Sums("output", x, weight, shape, stride, padding, dilation, groups)
        return float32_convolution(sums, bits, fraction_bits)
    w_GOK = weight.reshape(groups, weight.shape[0] // groups, -1)
    padded = zero_padded(x, padding, padding).contiguous()
    return _correlate(padded, w_GOK, weight.shape[2:], stride, dilation, bits, fraction_bits)


class _Phase(NamedTuple):
    """The gradient of every stride-th position of an input; all are reached by the same taps.

    Attributes:
        places: the positions, as an index of the input's gradient.
        taps: the taps that reach them, as an index of the weight, ascending along each dimension.
        before, after: number of zeros with which the output's gradient is padded.
        kernel, steps: the number of taps, and their distance in the padded gradient.
    """

    places: tuple[slice, ...]
    taps: tuple[slice, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    kernel: tuple[int, ...]
    steps: tuple[int, ...]


def _phases_along(
    size: int, length: int, k: int, stride: int, padding: int, dilation: int
) -> list[tuple[Any, ...]]:
    """Return the entries of :class:`_Phase` along one dimension of ``length`` outputs.

    For the j-th position tap ``taps[n]`` reads the gradient at ``start + j + step n``. Taps
    descend, so that these places ascend. Positions that no tap reaches are left out.
    """
    phases = []
    for first in range(min(stride, size)):
        residue = (first + padding) % stride
        taps = [t for t in range(k) if (t * dilation - residue) % stride == 0][::-1]
        if not taps:
            continue
        meets = [(first + padding - t * dilation) // stride for t in taps]
        distance, step = (taps[0] - taps[1], meets[1] - meets[0]) if len(taps) > 1 else (1, 1)
        positions, start = -(-(size - first) // stride), meets[0]
        after = start + positions + step * (len(taps) - 1) - length
        chosen = slice(taps[-1], taps[0] + 1, distance)
        phases.append((slice(first, None, stride), chosen, -start, after, len(taps), step))
    return phases


@lru_cache(maxsize=1024)
def _phases(
    size: tuple[int, ...], length: tuple[int, ...], kernel: tuple[int, ...],
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
) -> list[_Phase]:  # fmt: skip
    """Return the phases of an input of this size, one for each residue of the stride."""
    geometry = zip(size, length, kernel, stride, padding, dilation, strict=True)
    along = [_phases_along(*each) for each in geometry]
    return [_Phase(*zip(*each, strict=True)) for each in combinations(*along)]


def _input_gradient(
    grad: Tensor, weight: Tensor, size: list[int], stride: list[int], padding: list[int],
    dilation: list[int], groups: int, accumulation: str, bits: int, fraction_bits: int,
) -> Tensor:  # fmt: skip
    (outputs, C), dims = weight.shape[:2], len(size)
    if accumulation == "float32":
        shape = (grad.shape[0], groups * C, *size)
        wanted = Sums("input gradient", grad, weight, shape, stride, padding, dilation, groups)
        return float32_convolution(wanted, bits, fraction_bits)
    phases = _phases(
        tuple(size), grad.shape[2:], weight.shape[2:], tuple(stride), tuple(padding),
        tuple(dilation),
    )  # fmt: skip
    w_GCO = weight.reshape(groups, outputs // groups, C, *weight.shape[2:]).transpose(1, 2)
    every, spatial = (slice(None),) * 3, [3 + d for d in range(dims)]

    def sums(phase: _Phase) -> Tensor:
        w = w_GCO[every + phase.taps].flip(spatial).reshape(groups, C, -1)
        padded = zero_padded(grad, phase.before, phase.after).contiguous()
        return _correlate(padded, w, phase.kernel, (1,) * dims, phase.steps, bits, fraction_bits)

    if max(stride) == 1 and len(phases) == 1:
        return sums(phases[0])
    out = grad.new_zeros((grad.shape[0], groups * C, *size))
    for phase in phases:
        out[every[:2] + phase.places] = sums(phase)
    return out


def _weight_gradient(
    grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], groups: int, accumulation: str, bits: int, fraction_bits: int,
) -> Tensor:  # fmt: skip
    n, channels, P = grad.shape[0], x.shape[1], math.prod(grad.shape[2:])
    outputs, C, dims = grad.shape[1] // groups, channels // groups, len(kernel)
    if accumulation == "float32":
        shape = (grad.shape[1], C, *kernel)
        wanted = Sums("weight gradient", grad, x, shape, stride, padding, dilation, groups)
        return float32_convolution(wanted, bits, fraction_bits)
    # Channels last, so that the windows of a position are contiguous in memory.
    last = zero_padded(x, padding, padding).movedim(1, -1).contiguous()
    windows = sliding_windows(last.movedim(-1, 1), kernel, stride, dilation)
    if windows.shape[2 + dims :] != grad.shape[2:]:
        reached = tuple(slice(size) for size in grad.shape[2:])
        windows = windows[(slice(None),) * (2 + dims) + reached]
    order = [0, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims), 1]
    taps, ops, fmt = math.prod(kernel), kernels_of(grad), cached_format(bits, fraction_bits)

    def sums(first: int, number: int, images: int) -> Tensor:
        """Return the sums of ``number`` pieces of ``images`` images: ``[number, G, O, taps C]``."""
        some = slice(first, first + number * images)
        columns = windows[some].permute(order).reshape(number, images * P, taps, groups, C)
        columns = columns.permute(0, 3, 1, 2, 4).reshape(number * groups, images * P, taps * C)
        rows = grad[some].reshape(number, images, groups, outputs, P).permute(0, 2, 3, 1, 4)
        rows = rows.reshape(number * groups, outputs, images * P)
        return product(ops, rows, columns, fmt).reshape(number, groups, outputs, -1)

    images = max(1, LONG_SUM // max(1, P))
    number = max(1, _COLUMNS[x.device.type] // max(1, images * P * taps * channels))
    pieces = [
        sums(first * images, min(number, n // images - first), images)
        for first in range(0, n // images, number)
    ]
    if n % images or n == 0:
        pieces.append(sums(n - n % images, 1, n % images))
    total = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if total.shape[0] > 1:
        total = reduced(ops, total, None, [0], "plain", fmt, False, False)
    return total.reshape(groups * outputs, *kernel, C).movedim(-1, 1).contiguous()


def _forward_shape(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, *rest: Any
) -> Tensor:
    sizes = Geometry.of(x.dim() - 2, stride, padding, dilation).output_size(
        x.shape[2:], weight.shape[2:]
    )
    return x.new_empty((x.shape[0], weight.shape[0], *sizes))


def _input_shape(
    grad: Tensor,
    weight: Tensor,
    size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    *rest: Any,
) -> Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[1] * groups, *size))


def _weight_shape(
    grad: Tensor,
    x: Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    *rest: Any,
) -> Tensor:
    return x.new_empty((grad.shape[1], x.shape[1] // groups, *kernel))


_GEOMETRY = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, str accumulation,"
    f" {FORMAT}"
)
define_operator(
    "convolution",
    f"(Tensor x, Tensor weight, {_GEOMETRY}) -> Tensor",
    _forward,
    _forward_shape,
    _forward,
)
define_operator(
    "convolution_input",
    f"(Tensor grad, Tensor weight, SymInt[] size, {_GEOMETRY}) -> Tensor",
    _input_gradient,
    _input_shape,
    _input_gradient,
)
define_operator(
    "convolution_weight",
    f"(Tensor grad, Tensor x, SymInt[] kernel, {_GEOMETRY}) -> Tensor",
    _weight_gradient,
    _weight_shape,
    _weight_gradient,
)

define_operator(
    "convolution_gradients_float32",
    "(Tensor grad, Tensor x, Tensor weight, SymInt[] stride, SymInt[] padding, SymInt[] dilation,"
    f" SymInt groups, {FORMAT}) -> (Tensor, Tensor)",
    float32_gradients,
    lambda grad, x, weight, *rest: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    float32_gradients,
)


def _checked(x: Tensor, weight: Tensor, geometry: Geometry, outputs: bool) -> None:
    wanted = weight.shape[0] if outputs else weight.shape[1] * geometry.groups
    if (
        x.dim() != weight.dim()
        or x.dim() not in (3, 4, 5)
        or x.shape[1] != wanted
        or weight.shape[0] % geometry.groups
    ):
        raise ValueError(
            f"convolution of shapes {tuple(x.shape)} and {tuple(weight.shape)} in {geometry.groups}"
            " groups: needs [N, G C, ...] and [G O, C, ...] with one to three further dimensions"
            " and whole groups"
        )


def convolution(
    x: Tensor, weight: Tensor, geometry: Geometry, fmt: LNSFormat, *, accumulation: str = "contract"
) -> Tensor:
    """Return the convolution (cross-correlation, as torch has it) of int16 codes.

    Args:
        x: ``[N, G C, *size]``.
        weight: ``[G O, C, *kernel]``.
        geometry: stride, padding, dilation, groups.
        fmt: the format.
        accumulation: how sums are computed, see :mod:`lns_ops.functional.accumulation`.

    Returns:
        ``[N, G O, *positions]``.

    Raises:
        ValueError: shapes that do not match, a kernel larger than the padded input, or an unknown
            accumulation.
    """
    _checked(x, weight, geometry, outputs=False)
    if min(geometry.output_size(x.shape[2:], weight.shape[2:])) < 1:
        raise ValueError(
            f"convolution of a kernel of size {tuple(weight.shape[2:])} with an input of size"
            f" {tuple(x.shape[2:])}, padding {geometry.padding}, dilation {geometry.dilation}: the"
            " kernel does not fit; pad the input more"
        )
    return operators_for(x).convolution(  # type: ignore[no-any-return]
        x, weight, *geometry, check_accumulation(accumulation), fmt.bits, fmt.fraction_bits
    )


def input_gradient(
    grad: Tensor,
    weight: Tensor,
    size: Sequence[int],
    geometry: Geometry,
    fmt: LNSFormat,
    *,
    accumulation: str = "contract",
) -> Tensor:
    """Return the gradient of :func:`convolution` for its input of spatial ``size``.

    As a function of ``grad`` it is the transposed convolution.

    Raises:
        ValueError: shapes that do not match, or an unknown accumulation.
    """
    _checked(grad, weight, geometry, outputs=True)
    return operators_for(grad).convolution_input(  # type: ignore[no-any-return]
        grad,
        weight,
        list(size),
        *geometry,
        check_accumulation(accumulation),
        fmt.bits,
        fmt.fraction_bits,
    )


def weight_gradient(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    geometry: Geometry,
    fmt: LNSFormat,
    *,
    accumulation: str = "contract",
) -> Tensor:
    """Return the gradient of :func:`convolution` for its weight of kernel size ``kernel``."""
    return operators_for(grad).convolution_weight(  # type: ignore[no-any-return]
        grad,
        x,
        list(kernel),
        *geometry,
        check_accumulation(accumulation),
        fmt.bits,
        fmt.fraction_bits,
    )


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, fmt: LNSFormat, *,
    accumulation: str = "contract",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return :func:`input_gradient` and :func:`weight_gradient` of one convolution."""
    if accumulation == "float32":
        _checked(grad, weight, geometry, outputs=True)
        return operators_for(grad).convolution_gradients_float32(  # type: ignore[no-any-return]
            grad, x, weight, *geometry, fmt.bits, fmt.fraction_bits
        )
    return (
        input_gradient(grad, weight, x.shape[2:], geometry, fmt, accumulation=accumulation),
        weight_gradient(grad, x, weight.shape[2:], geometry, fmt, accumulation=accumulation),
    )
