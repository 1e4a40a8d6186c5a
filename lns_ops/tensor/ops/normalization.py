"""Batch, layer, group, instance and root-mean-square normalization, in LNS, with one gradient.

:mod:`lns_ops.functional.normalization` has the equations. Averages run over the last dimensions
first, so for images first over positions, then over examples. Sums use the contract's order. Means
are rounded and therefore subtracted twice; the root is a power that is rounded once. Weight and
bias are applied by an LNS product and an LNS sum.

Running statistics of BatchNorm stay float32 buffers. They are averages over steps with a factor of
0.1; an LNS update would stop a few per cent short, and no gradient passes through them. In
evaluation they are encoded.

Sources: S. Ioffe, C. Szegedy 2015 (arXiv:1502.03167); J. L. Ba et al. 2016 (arXiv:1607.06450); Y.
Wu, K. He 2018 (arXiv:1803.08494); B. Zhang, R. Sennrich 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.functional.library import OPS
from lns_ops.functional.normalization import (
    centre,
    inverse_root,
    normalization,
    normalization_backward,
    stages,
    track_,
)
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.lns_tensor import LNSTensor, gradient, in_format
from lns_ops.tensor.ops.reductions import centred
from lns_ops.tensor.registry import replaces


class _Normalize(torch.autograd.Function):
    """The normalization of :mod:`lns_ops.functional.normalization` and its gradients.

    ``shape`` is the shape in which weight and bias broadcast to ``x``. It also returns the codes of
    the mean and its rest (empty for RMSNorm) and of the variance, and placeholders for ``y`` and
    ``s``, from which the gradient is computed. Second derivatives arrive here as gradients of the
    placeholders.
    """

    @staticmethod
    def forward(
        ctx: Any, x: LNSTensor, weight: LNSTensor | None, bias: LNSTensor | None,
        shape: list[int], dims: list[int], eps: float, centred: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        w, b = (None if p is None else p.codes for p in (weight, bias))
        made = normalization(x.codes, w, b, shape, dims, eps, centred, x.fmt)
        stand_ins = [_without_memory(made.y), _without_memory(made.scale)]
        ctx.save_for_backward(made.y, made.scale, weight, bias, *stand_ins)
        ctx.fmt, ctx.dims, ctx.centred, ctx.shape = x.fmt, dims, centred, shape
        statistics = made.mean, made.rest, made.variance
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        return LNSTensor(made.out, x.fmt), *statistics, *stand_ins

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, _mean: None, _rest: None, _variance: None,
        of_y: Tensor | None, of_scale: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        wanted, second = ctx.needs_input_grad[:3], of_y is not None or of_scale is not None
        if torch.is_grad_enabled() or grad is None or second:
            return *_composed(ctx, grad, of_y, of_scale), None, None, None, None
        y, scale, weight, bias, *_ = ctx.saved_tensors
        w, b = (None if p is None else p.codes for p in (weight, bias))
        codes = normalization_backward(
            gradient(grad, ctx.fmt).codes, y, scale, w, b, ctx.shape, ctx.dims, ctx.centred, wanted,
            ctx.fmt,
        )  # fmt: skip
        grads = (
            LNSTensor(c, ctx.fmt) if want else None for c, want in zip(codes, wanted, strict=True)
        )
        return *grads, None, None, None, None


def _without_memory(codes: Tensor) -> Tensor:
    """Return a float tensor that represents codes in the graph, with one element of memory."""
    return codes.new_empty_strided(codes.shape, [0] * codes.dim(), dtype=torch.float32)


class _InPlaceOf(torch.autograd.Function):
    """An LNSTensor with given codes whose gradient goes to the placeholder in the graph."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, codes: Tensor, fmt: LNSFormat) -> LNSTensor:
        return LNSTensor(codes, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def _composed(
    ctx: Any, grad: Tensor | None, of_y: Tensor | None, of_scale: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``x``, weight and bias, by differentiable operations.

    For a gradient of ``y weight + bias`` they have the bits of
    :func:`lns_ops.functional.normalization.normalization_backward`; ``y`` and ``s`` may have
    gradients as well, because ``ds/dx = -s^2 y / n``.
    """
    *codes, weight, bias, y, scale = ctx.saved_tensors
    in_place_of: Callable[..., LNSTensor] = _InPlaceOf.apply
    y, scale = (in_place_of(x, c, ctx.fmt) for x, c in zip((y, scale), codes, strict=True))
    grad, of_y, of_scale = (
        None if g is None else gradient(g, ctx.fmt) for g in (grad, of_y, of_scale)
    )
    wanted_x, wanted_weight, wanted_bias = ctx.needs_input_grad[:3]
    dx = dw = db = None
    if grad is not None and wanted_weight:
        dw = _folded(grad * y, weight, ctx.shape)
    if grad is not None and wanted_bias:
        db = _folded(grad, bias, ctx.shape)
    if wanted_x:
        if grad is not None and weight is not None:
            grad = grad * weight.reshape(ctx.shape)
        parts = [g for g in (grad, of_y) if g is not None]
        total = sum(parts[1:], parts[0]) if parts else torch.zeros_like(y)
        if ctx.centred:
            total = centred(total, lambda x: _mean(x, ctx.dims))
        along = _mean(total * y, ctx.dims)
        if of_scale is not None:
            along = along + of_scale * scale / math.prod(y.shape[d] for d in ctx.dims)
        dx = (total - y * along) * scale
    return dx, dw, db


def _folded(x: Tensor, parameter: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum over the dimensions along which a parameter, viewed as ``shape``, was broadcast."""
    return x.sum_to_size(parameter.reshape(shape).shape).reshape(parameter.shape)


def _mean(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return means over ``dims``, the last ones first; they remain as dimensions of size 1."""
    for stage in stages(tuple(dims), x.dim()):
        x = x.mean(stage, keepdim=True)
    return x


def _normalized(
    x: Tensor, dims: Sequence[int], eps: float, weight: Tensor | None = None,
    bias: Tensor | None = None, shape: Sequence[int] = (), *, centred: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return ``(x - mean) / sqrt(variance + eps)`` over ``dims``, and the statistics in codes.

    The statistics are the mean, the rest of the mean, and the variance, in codes of
    ``fmt.of_squares``. The mean is subtracted only if ``centred``; otherwise mean and rest are
    empty. The result is multiplied by ``weight``, and ``bias`` is added, both viewed as ``shape``.
    For an empty ``x`` all results are empty.
    """
    given = [parameter for parameter in (weight, bias) if parameter is not None]
    if not isinstance(x, LNSTensor):  # a float input with an LNS weight
        x = LNSTensor.from_float(x, next(p.fmt for p in given if isinstance(p, LNSTensor)))
    if not x.codes.numel():  # no examples, for example an expert that gets none
        none = x.codes.new_empty(0)
        return _affine(x, weight, bias, shape), none, none, none
    fused = all(isinstance(p, LNSTensor) and p.fmt == x.fmt for p in given)
    w, b = (weight, bias) if fused else (None, None)
    apply: Callable[..., tuple[Tensor, ...]] = _Normalize.apply
    y, mean, rest, variance, *_ = apply(x, w, b, list(shape), list(dims), eps, centred)
    return y if fused else _affine(y, weight, bias, shape), mean, rest, variance


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    if weight is not None:
        y = y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _last(input: LNSTensor, normalized_shape: Sequence[int]) -> range:
    """Return the dimensions of ``normalized_shape``, the input's last ones.

    Raises:
        ValueError: ``normalized_shape`` is empty or differs from the input's last sizes.
    """
    sizes, first = tuple(normalized_shape), input.dim() - len(normalized_shape)
    if not sizes or first < 0 or tuple(input.shape[first:]) != sizes:
        raise ValueError(
            f"normalized_shape={list(sizes)} for an input of shape {tuple(input.shape)}: must be"
            " its last sizes, at least one"
        )
    return range(first, input.dim())


@replaces(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: LNSTensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn: bool = False,
) -> Tensor:
    """Normalize over the last dimensions (LayerNorm)."""
    dims = _last(input, normalized_shape)
    return _normalized(input, dims, eps, weight, bias, normalized_shape)[0]


@replaces(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: LNSTensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """Normalize by the root mean square (RMSNorm) over the last dimensions.

    ``eps`` defaults to float32's epsilon.
    """
    dims = _last(input, normalized_shape)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return _normalized(input, dims, eps, weight, None, normalized_shape, centred=False)[0]


@replaces(F.group_norm, torch.group_norm)
def group_norm(
    input: LNSTensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn: bool = False,
) -> Tensor:
    """Normalize over the channels of a group and all positions of an example (GroupNorm)."""
    n, channels = input.shape[:2]
    grouped = input.reshape(n, num_groups, channels // num_groups, math.prod(input.shape[2:]))
    shape = [num_groups, channels // num_groups, 1]
    y = _normalized(cast(LNSTensor, grouped), (2, 3), eps, weight, bias, shape)[0]
    return y.reshape(input.shape)


@torch.no_grad()
def _track(
    running: Sequence[Tensor | None], mean: Tensor, rest: Tensor, variance: Tensor,
    fmt: LNSFormat, terms: int, factor: float,
) -> None:  # fmt: skip
    """Update ``running = (1 - factor) running + factor batch`` in float32.

    The batch's mean (in two parts) and variance are codes; the variance is over ``terms`` terms.
    """
    if any(average is not None for average in running):
        track_(running, mean, rest, variance, terms / max(1, terms - 1), factor, fmt)


def _with_statistics(x: LNSTensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    shape = [1, -1, *[1] * (x.dim() - 2)]
    mean = mean.detach().reshape(shape)
    center = LNSTensor.from_float(mean, x.fmt)
    rest = LNSTensor.from_float(mean - center.to_float(), x.fmt)
    spread = lns.encode(variance.detach().reshape(shape), x.fmt.of_squares)
    return (x - center - rest) * LNSTensor(inverse_root(OPS, spread, eps, x.fmt), x.fmt)


def _batch(
    x: LNSTensor, mean: Any, variance: Any, weight: Any, bias: Any, factor: float, eps: float
) -> Tensor:
    codes, fmt = x.codes, x.fmt
    dims = [0, *range(2, codes.dim())]
    count = codes.numel() // codes.shape[1]
    if count == 1:
        raise ValueError(
            "batch norm of 1 value per channel in training: needs more than one; use a larger batch"
            " or eval()"
        )
    shape = [-1, *[1] * (codes.dim() - 2)]
    y, *batch = _normalized(x, dims, eps, weight, bias, shape)
    if count:
        _track((mean, variance), batch[0], batch[1], batch[2], fmt, count, factor)
    return y


@replaces(F.batch_norm)
def batch_norm(
    input: LNSTensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, cudnn: bool = False,
) -> Tensor:  # fmt: skip
    """Normalize over examples and positions (BatchNorm), with the signatures of F and of torch.

    Running statistics are float32 tensors, updated in training.
    """
    if isinstance(running_mean, LNSTensor) or isinstance(running_var, LNSTensor):
        raise ValueError(
            "running statistics as LNSTensors: they must be float32; convert_ does not change"
            " buffers, so leave them as they are"
        )
    if not isinstance(input, LNSTensor):  # from a layer with its own forward
        fmt = next(x.fmt for x in (weight, bias) if isinstance(x, LNSTensor))
        input = in_format(input, fmt.bits, fmt.fraction_bits)
    channels = input.shape[1] if input.dim() > 1 else 0
    for values in (running_mean, running_var, weight, bias):
        if values is not None and values.numel() != channels:
            raise ValueError(
                f"batch norm of {channels} channels with statistics or weights of"
                f" {values.numel()}: the numbers must be equal"
            )
    if training or running_mean is None:
        return _batch(input, running_mean, running_var, weight, bias, momentum, eps)
    y = _with_statistics(input, running_mean, running_var, eps)
    return _affine(y, weight, bias, [-1, *[1] * (input.dim() - 2)])


@replaces(torch.batch_norm)
def _torch_batch_norm(
    input: LNSTensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@replaces(F.instance_norm)
def instance_norm(
    input: LNSTensor, running_mean: Any = None, running_var: Any = None, weight: Any = None,
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalize over the positions of each channel of each example (InstanceNorm)."""
    shape = [-1, *[1] * (input.dim() - 2)]
    if not use_input_stats:
        return _affine(_with_statistics(input, running_mean, running_var, eps), weight, bias, shape)
    count, averages = math.prod(input.shape[2:]), (running_mean, running_var)
    if count == 1:
        raise ValueError(
            f"instance norm of an input of shape {tuple(input.shape)}: needs more than one position"
            " in a channel; use a larger input, or running statistics in eval()"
        )
    y, mean, rest, variance = _normalized(input, range(2, input.dim()), eps, weight, bias, shape)
    if input.numel() and any(average is not None for average in averages):
        _, mean, left = centre(OPS, mean, [0], input.fmt)
        rest = lns.add(left, lns.mean(rest, [0], input.fmt, keepdim=True), input.fmt)
        variance = lns.mean(variance, [0], input.fmt.of_squares)
        _track(averages, mean, rest, variance, input.fmt, count, momentum)
    return y
