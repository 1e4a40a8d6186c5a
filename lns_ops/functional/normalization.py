"""Normalizations and their gradients, each as one operator. The equations, over ``n`` values::

    d = c(x)        v = sum(d^2) / n        s = (v + eps)^(-1/2)        y = d s
    e = c(grad weight)                      dx = s (e - y sum(e y) / n)

where ``c`` subtracts the mean twice (or does nothing if it is not centred). A mean is rounded: for
data whose mean is 100 times their deviation, the first difference still has a mean of half a
deviation in lns16, which the second subtraction removes. ``y weight + bias`` is computed last.

Every step rounds to the format, like the operations of :mod:`lns_ops.functional` of which it is
composed; ``v`` and ``eps`` are rounded to the format of squares
(:attr:`lns_ops.LNSFormat.of_squares`), where ``eps`` is at least the smallest magnitude. ``s`` is
at least the smallest magnitude of the format itself. On a GPU everything is one kernel if
:mod:`lns_ops.cuda.normalization` supports the shape, otherwise the elementwise part is one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lns_ops import cuda
from lns_ops.cuda import normalization as on_gpu
from lns_ops.functional import indexed  # noqa: F401 (defines the kernels of powers)
from lns_ops.functional.elementwise import encode_number, number_code, within
from lns_ops.functional.library import (
    FORMAT,
    cached_format,
    define_kernels,
    define_operator,
    kernels_of,
    operators_for,
)
from lns_ops.functional.reductions import format_of, reduced
from lns_ops.spec.format import LNSFormat


def _elementwise(
    x: Tensor, mean: Tensor | None, scale: Tensor, weight: Tensor | None, bias: Tensor | None,
    *fmt: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``y = (x - mean) scale``, and ``y weight + bias``, empty without weight and bias."""
    ops = kernels_of(x)
    y = ops.mul(x if mean is None else ops.sub(x, mean, *fmt), scale, *fmt)
    if weight is None and bias is None:
        return y, x.new_empty(0)
    out = y if weight is None else ops.mul(y, weight, *fmt)
    return y, out if bias is None else ops.add(out, bias, *fmt)


def _elementwise_backward(
    grad: Tensor, y: Tensor, along: Tensor, scale: Tensor, *fmt: int
) -> Tensor:
    """Return ``(grad - y along) scale``."""
    ops = kernels_of(grad)
    rest = ops.sub(grad, ops.mul(y, along, *fmt), *fmt)
    return ops.mul(rest, scale, *fmt)  # type: ignore[no-any-return]


define_kernels("normalize", _elementwise, cuda.normalize)
define_kernels("normalize_backward", _elementwise_backward, cuda.normalize_backward)


@lru_cache(maxsize=256)
def stages(dims: tuple[int, ...], rank: int) -> list[list[int]]:
    """Return the dimensions to average over in turn: the last ones first, then the others."""
    trailing = [d for d in dims if set(range(d, rank)) <= set(dims)]
    rest = [d for d in dims if d not in trailing]
    return [stage for stage in (trailing, rest) if stage]


def _mean(x: Tensor, y: Tensor | None, kind: str, dims: Sequence[int], fmt: LNSFormat) -> Tensor:
    """Return means over the last dimensions first, then over the others.

    They are means of means of equally many values, computed without moving values. ``y`` and
    ``kind`` are as in :func:`lns_ops.functional.reductions.reduced`.
    """
    ops = kernels_of(x)
    for stage in stages(tuple(dims), x.dim()):
        x = reduced(ops, x, y, stage, kind, fmt, True, True)
        y, kind, fmt = None, "plain", format_of(kind, fmt)
    return x


def centre(ops: Any, x: Tensor, dims: Sequence[int], fmt: LNSFormat) -> tuple[Tensor, ...]:
    """Return ``d = x - mean``, the mean, and the mean of d, the rounding error of the mean."""
    mean = _mean(x, None, "plain", dims, fmt)
    d = ops.sub(x, mean, fmt.bits, fmt.fraction_bits)
    return d, mean, _mean(d, None, "plain", dims, fmt)


def _least(eps: float, fmt: LNSFormat) -> float:
    return max(eps, fmt.of_squares.smallest) if eps >= 0 else eps


@lru_cache(maxsize=256)
def _code_of(value: float, bits: int, fraction_bits: int) -> int:
    """Return the code of a factor of the variance, or of a number that is added to it."""
    return number_code(value, cached_format(bits, fraction_bits).of_squares)


def inverse_root(ops: Any, variance: Tensor, eps: float, fmt: LNSFormat) -> Tensor:
    """Return ``(variance + eps)^(-1/2)``; ``ops`` are torch's operators or a device's kernels.

    ``variance`` is in the format of squares, the result in ``fmt``, at least its smallest
    magnitude.
    """
    squares = fmt.of_squares
    least = encode_number(_least(eps, fmt), squares)
    name = squares.bits, squares.fraction_bits
    root = ops.lookup(ops.add(variance, least, *name), "power", [-0.5], *name)
    return within(root, fmt).clamp(min=1)


def _normalization(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int],
    dims: Sequence[int], eps: float, centred: bool, bits: int, fraction_bits: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    ops, fmt = kernels_of(x), cached_format(bits, fraction_bits)
    mean, rest = x.new_empty(0), x.new_empty(0)  # results must not share memory
    if centred:
        x, mean, rest = centre(ops, x, dims, fmt)
    about: Tensor | None = rest if centred else None
    if centred and not x.is_cuda:  # a difference costs no launch, so compute it once
        x, about = ops.sub(x, rest, bits, fraction_bits), None
    variance = _mean(x, about, "squares", dims, fmt)
    scale = inverse_root(ops, variance, eps, fmt)
    w, b = (None if p is None else p.reshape(shape) for p in (weight, bias))
    y, out = ops.normalize(x, about, scale, w, b, bits, fraction_bits)
    return y, out, mean, rest, variance, scale


def _normalization_backward(
    grad: Tensor, y: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None,
    shape: Sequence[int], dims: Sequence[int], centred: bool, wanted: Sequence[bool], bits: int,
    fraction_bits: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ops, fmt = kernels_of(grad), cached_format(bits, fraction_bits)
    dx, dw, db = (grad.new_empty(0) for _ in range(3))  # results must not share memory
    if wanted[1] and weight is not None:
        dw = _summed(grad, y, "products", weight, shape, fmt)
    if wanted[2] and bias is not None:
        db = _summed(grad, None, "plain", bias, shape, fmt)
    if wanted[0]:
        if weight is not None:
            grad = ops.mul(grad, weight.reshape(shape), bits, fraction_bits)
        if centred:
            grad, _, rest = centre(ops, grad, dims, fmt)
            grad = ops.sub(grad, rest, bits, fraction_bits)
        along = _mean(grad, y, "products", dims, fmt)
        dx = ops.normalize_backward(grad, y, along, scale, bits, fraction_bits)
    return dx, dw, db


def _cut(x: Tensor, dims: Sequence[int], fraction_bits: int) -> on_gpu.Cut | None:
    """Return how a GPU's kernels split a normalization over ``dims``; None if they cannot."""
    dims = tuple(sorted(dims))
    return on_gpu.cut_of(x.shape, dims, _lengths(x.shape, dims), fraction_bits, x.get_device())


@lru_cache(maxsize=4096)
def _lengths(shape: torch.Size, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of terms of the means that are computed in turn."""
    return tuple(math.prod(shape[d] for d in stage) for stage in stages(dims, len(shape)))


def _normalization_on_gpu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int],
    dims: Sequence[int], eps: float, centred: bool, bits: int, fraction_bits: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    cut = _cut(x, dims, fraction_bits) if eps >= 0 else None
    if cut is None:
        return _normalization(x, weight, bias, shape, dims, eps, centred, bits, fraction_bits)
    w, b = (None if p is None else p.reshape(shape) for p in (weight, bias))
    least = _code_of(_least(eps, cached_format(bits, fraction_bits)), bits, fraction_bits)
    return on_gpu.normalization(cut, x, w, b, least, centred, bits, fraction_bits)


def _normalization_backward_on_gpu(
    grad: Tensor, y: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None,
    shape: Sequence[int], dims: Sequence[int], centred: bool, wanted: Sequence[bool], bits: int,
    fraction_bits: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wanted = [want and p is not None for want, p in zip(wanted, (grad, weight, bias), strict=True)]
    cut, fmt = _cut(grad, dims, fraction_bits), (bits, fraction_bits)
    rest = (y, scale, weight, bias, shape, dims, centred)
    if cut is None or not any(wanted):
        return _normalization_backward(grad, *rest, wanted, *fmt)
    given = [p for p in (weight, bias) if p is not None]
    if all(_has_one_a_group(p.reshape(shape).shape, cut.kept) for p in given):
        of_x, *sums = on_gpu.normalization_backward(
            cut, grad, y, scale, weight, centred, wanted, *fmt
        )
        shapes = (() if p is None else p.shape for p in (weight, bias))
        of_weight, of_bias = (
            g.reshape(own) if want else g
            for g, own, want in zip(sums, shapes, wanted[1:], strict=True)
        )
        return of_x, of_weight, of_bias
    of_x, of_weight, of_bias = _normalization_backward(grad, *rest, [False, *wanted[1:]], *fmt)
    if wanted[0]:
        if weight is not None:
            grad = kernels_of(grad).mul(grad, weight.reshape(shape), *fmt)
        of_x, _, _ = on_gpu.normalization_backward(
            cut, grad, y, scale, None, centred, (True, False, False), *fmt
        )
    return of_x, of_weight, of_bias


def _has_one_a_group(seen: Sequence[int], kept: Sequence[int]) -> bool:
    """Return whether a parameter, viewed in the shape ``seen``, has one element a group."""
    return (1,) * (len(kept) - len(seen)) + tuple(seen) == tuple(kept)


def _summed(
    x: Tensor, y: Tensor | None, kind: str, parameter: Tensor, shape: Sequence[int], fmt: LNSFormat
) -> Tensor:
    """Sum over the dimensions along which a parameter, viewed as ``shape``, was broadcast."""
    seen = parameter.reshape(shape).shape
    new = x.dim() - len(seen)
    dims = [d for d in range(x.dim()) if d < new or seen[d - new] == 1 != x.shape[d]]
    return reduced(kernels_of(x), x, y, dims, kind, fmt, True, False).reshape(parameter.shape)


def _track_(
    mean_average: Tensor | None, variance_average: Tensor | None, mean: Tensor, rest: Tensor,
    variance: Tensor, unbiased: float, momentum: float, bits: int, fraction_bits: int,
) -> None:  # fmt: skip
    ops, squares = kernels_of(mean), cached_format(bits, fraction_bits).of_squares

    def follow(average: Tensor, value: Tensor) -> None:
        average.mul_(1 - momentum).add_(value.reshape(average.shape), alpha=momentum)

    if mean_average is not None:
        values = (ops.decode(m, bits, fraction_bits, torch.float32) for m in (mean, rest))
        follow(mean_average, torch.add(*values))
    if variance_average is not None:
        own = squares.bits, squares.fraction_bits
        variance = ops.mul(variance, encode_number(unbiased, squares), *own)
        follow(variance_average, ops.decode(variance, *own, torch.float32))


def _track_on_gpu_(
    mean_average: Tensor | None, variance_average: Tensor | None, mean: Tensor, rest: Tensor,
    variance: Tensor, unbiased: float, momentum: float, bits: int, fraction_bits: int,
) -> None:  # fmt: skip
    averages = (mean_average, variance_average)
    given = [average for average in averages if average is not None]
    if not all(
        a.dtype is torch.float32
        and a.is_contiguous()
        and (a.device, a.numel()) == (mean.device, mean.numel())
        for a in given
    ):
        _track_(*averages, mean, rest, variance, unbiased, momentum, bits, fraction_bits)
        return
    by = _code_of(unbiased, bits, fraction_bits)
    on_gpu.track_(averages, mean, rest, variance, by, momentum, bits, fraction_bits)
    for average in given:
        if not average.is_inference():
            torch.autograd.graph.increment_version(average)


def _shapes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Any, dims: Sequence[int],
    eps: float, centred: bool, *fmt: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    kept = [1 if d in dims else n for d, n in enumerate(x.shape)]
    affine = weight is not None or bias is not None
    of_mean = kept if centred else 0
    sizes = (x.shape, x.shape if affine else 0, of_mean, of_mean, kept, kept)
    return tuple(x.new_empty(size) for size in sizes)


def _backward_shapes(
    grad: Tensor, y: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Any,
    dims: Any, centred: bool, wanted: Sequence[bool], *fmt: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    made = (grad.shape, *(0 if p is None else p.shape for p in (weight, bias)))
    return tuple(grad.new_empty(s if want else 0) for s, want in zip(made, wanted, strict=True))


define_operator(
    "normalization",
    "(Tensor x, Tensor? weight, Tensor? bias, int[] shape, int[] dims, float eps, bool centred,"
    f" {FORMAT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _normalization,
    _shapes,
    _normalization_on_gpu,
)
define_operator(
    "normalization_backward",
    "(Tensor grad, Tensor y, Tensor scale, Tensor? weight, Tensor? bias, int[] shape, int[] dims,"
    f" bool centred, bool[] wanted, {FORMAT}) -> (Tensor, Tensor, Tensor)",
    _normalization_backward,
    _backward_shapes,
    _normalization_backward_on_gpu,
)


define_operator(
    "track_",
    "(Tensor(a!)? mean_average, Tensor(b!)? variance_average, Tensor mean, Tensor rest,"
    f" Tensor variance, float unbiased, float momentum, {FORMAT}) -> ()",
    _track_,
    lambda *arguments: None,
    _track_on_gpu_,
)


class Normalized(NamedTuple):
    """The results of a normalization: ``y``, ``y weight + bias``, the statistics and ``s``.

    The mean is the sum of two codes; the second one is the rounding error of the first. Both are
    empty if the normalization is not centred.
    """

    y: Tensor
    out: Tensor
    mean: Tensor
    rest: Tensor
    variance: Tensor
    scale: Tensor


def normalization(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int],
    dims: Sequence[int], eps: float, centred: bool, fmt: LNSFormat,
) -> Normalized:  # fmt: skip
    """Normalize int16 codes ``x`` over ``dims``; statistics keep these dimensions, of size 1.

    The variance is in codes of ``fmt.of_squares``.

    Args:
        weight, bias: with the same shape, or absent; they broadcast to ``x``, viewed as ``shape``.
    """
    made = Normalized(
        *operators_for(x).normalization(
            x, weight, bias, shape, dims, eps, centred, fmt.bits, fmt.fraction_bits
        )
    )
    # a copy, because backward needs ``y`` even if ``out`` is changed in place
    return made._replace(out=made.y.clone()) if weight is None and bias is None else made


def normalization_backward(
    grad: Tensor, y: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None,
    shape: Sequence[int], dims: Sequence[int], centred: bool, wanted: Sequence[bool],
    fmt: LNSFormat,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``x``, weight and bias; gradients that are not ``wanted`` are empty.

    ``y`` and ``scale`` are results of :func:`normalization`; the other arguments are as there.
    """
    return operators_for(grad).normalization_backward(  # type: ignore[no-any-return]
        grad, y, scale, weight, bias, shape, dims, centred, wanted, fmt.bits, fmt.fraction_bits
    )


def track_(
    averages: Sequence[Tensor | None], mean: Tensor, rest: Tensor, variance: Tensor,
    unbiased: float, momentum: float, fmt: LNSFormat,
) -> None:  # fmt: skip
    """Update running averages (float tensors) from the codes of a batch's mean and variance.

    ``average = (1 - momentum) average + momentum value``. The values are ``mean + rest``, and the
    variance (in codes of ``fmt.of_squares``) times ``unbiased``. One of the averages may be absent.
    """
    name = fmt.bits, fmt.fraction_bits
    operators_for(mean).track_(*averages, mean, rest, variance, unbiased, momentum, *name)
