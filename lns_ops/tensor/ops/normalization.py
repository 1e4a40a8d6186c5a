"""Batch, layer, group, instance and root-mean-square normalization, in LNS, with one gradient.

Over the dimensions that are averaged, ``n`` values (the last dimensions first, so for images:
positions, then examples)::

    d = x - sum(x) / n        v = sum(d^2) / n        s = (v + eps)^(-1/2)        y = d s
    dx = s (g - sum(g) / n - y sum(g y) / n)

(without ``d`` and the first mean for RMSNorm), sums in the contract's order, the root a power of
one rounding. ``eps`` is at least the format's smallest magnitude. Weight and bias are an LNS
product and an LNS sum behind it.

Running statistics of BatchNorm stay float32 buffers: they are averages over steps with a factor of
0.1, which an LNS update would stop following within some per cent, and nothing of the gradient
passes through them. In evaluation they are encoded.

Sources: S. Ioffe, C. Szegedy 2015 (arXiv:1502.03167); J. L. Ba et al. 2016 (arXiv:1607.06450); Y.
Wu, K. He 2018 (arXiv:1803.08494); B. Zhang, R. Sennrich 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from lns_ops import functional as lns
from lns_ops.functional.indexed import power
from lns_ops.functional.normalization import normalize, normalize_backward
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.lns_tensor import LNSTensor, gradient
from lns_ops.tensor.registry import replaces


def _mean(x: Tensor, dims: Sequence[int], fmt: LNSFormat, **terms: Tensor) -> Tensor:
    """Return means over the last dimensions first, then over the others.

    They are means of means of equal numbers of values, without moving any. ``terms`` are those of
    :func:`lns_ops.functional.mean`.
    """
    trailing = [d for d in dims if set(range(d, x.dim())) <= set(dims)]
    rest = [d for d in dims if d not in trailing]
    if not rest or not trailing:
        return lns.mean(x, dims, fmt, keepdim=True, **terms)
    return lns.mean(lns.mean(x, trailing, fmt, keepdim=True, **terms), rest, fmt, keepdim=True)


def _inverse_root(variance: Tensor, eps: float, fmt: LNSFormat) -> Tensor:
    return power(
        lns.add(variance, lns.encode_number(max(eps, fmt.smallest) if eps >= 0 else eps, fmt), fmt),
        -0.5,
        fmt,
    )


class _Normalize(torch.autograd.Function):
    """The normalization ``y`` of the head of this file, ``y weight + bias``, and their gradients.

    ``shape`` is that in which weight and bias meet ``x``. It also returns the mean (None for
    RMSNorm) and the variance, without gradients. Its gradient has no gradient: asking for one
    raises.
    """

    @staticmethod
    def forward(
        ctx: Any, x: LNSTensor, weight: LNSTensor | None, bias: LNSTensor | None,
        shape: list[int], dims: list[int], eps: float, centred: bool,
    ) -> tuple[LNSTensor, LNSTensor | None, LNSTensor]:  # fmt: skip
        fmt, codes = x.fmt, x.codes
        mean = _mean(codes, dims, fmt) if centred else None
        squares = {"times": codes} if mean is None else {"about": mean}
        variance = _mean(codes, dims, fmt, **squares)
        scale = _inverse_root(variance, eps, fmt)
        w, b = (None if p is None else p.codes.reshape(shape) for p in (weight, bias))
        y, out = normalize(codes, mean, scale, w, b, fmt)
        ctx.save_for_backward(LNSTensor(y, fmt), LNSTensor(scale, fmt), weight, bias)
        ctx.dims, ctx.centred, ctx.shape = dims, centred, shape
        results = (
            LNSTensor(out, fmt),
            None if mean is None else LNSTensor(mean, fmt),
            LNSTensor(variance, fmt),
        )
        ctx.mark_non_differentiable(*(r for r in results[1:] if r is not None))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        normal, scale, weight, bias = ctx.saved_tensors
        grad = gradient(grad, normal.fmt)
        fmt, g, y = grad.fmt, grad.codes, normal.codes
        wanted_x, wanted_weight, wanted_bias = ctx.needs_input_grad[:3]
        dw = _summed(g, weight, ctx.shape, times=y) if wanted_weight else None
        db = _summed(g, bias, ctx.shape) if wanted_bias else None
        dx = None
        if wanted_x:
            if weight is not None:
                g = lns.mul(g, weight.codes.reshape(ctx.shape), fmt)
            mean = _mean(g, ctx.dims, fmt) if ctx.centred else None
            along = _mean(g, ctx.dims, fmt, times=y)
            dx = LNSTensor(normalize_backward(g, y, mean, along, scale.codes, fmt), fmt)
        return dx, dw, db, None, None, None, None


def _summed(
    codes: Tensor, parameter: LNSTensor, shape: Sequence[int], **terms: Tensor
) -> LNSTensor:
    """Return sums over what a parameter, seen as ``shape``, was repeated along, in its shape."""
    seen, fmt = parameter.codes.reshape(shape), parameter.fmt
    new = codes.dim() - seen.dim()
    dims = [d for d in range(codes.dim()) if d < new or seen.shape[d - new] == 1 != codes.shape[d]]
    sums = lns.sum(codes, dims, fmt, keepdim=True, **terms)
    return LNSTensor(sums.reshape(parameter.codes.shape), fmt)


def _normalized(
    x: LNSTensor, dims: Sequence[int], eps: float, weight: Tensor | None = None,
    bias: Tensor | None = None, shape: Sequence[int] = (), *, centred: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return ``(x - mean) / sqrt(variance + eps)`` over ``dims``, the mean, and the variance.

    The mean is subtracted only if ``centred``; the first is multiplied by ``weight`` and has
    ``bias`` added, as they are in ``shape``.
    """
    if not x.numel():
        raise ValueError(
            f"normalization of an empty tensor of shape {tuple(x.shape)}: it has no mean; leave"
            " it out"
        )
    given = [parameter for parameter in (weight, bias) if parameter is not None]
    fused = all(isinstance(p, LNSTensor) and p.fmt == x.fmt for p in given)
    w, b = (weight, bias) if fused else (None, None)
    y, mean, variance = _Normalize.apply(x, w, b, list(shape), list(dims), eps, centred)  # type: ignore[no-untyped-call]
    return y if fused else _affine(y, weight, bias, shape), mean, variance


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    if weight is not None:
        y = y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


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
    dims = range(input.dim() - len(normalized_shape), input.dim())
    return _normalized(input, dims, eps, weight, bias, normalized_shape)[0]


@replaces(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: LNSTensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """Normalize by the root mean square (RMSNorm) over the last dimensions.

    ``eps`` is float32's epsilon unless given.
    """
    dims = range(input.dim() - len(normalized_shape), input.dim())
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
def _track(running: Tensor | None, batch: Any, factor: float) -> None:
    """Update ``running = (1 - factor) running + factor batch`` in float32."""
    if running is not None:
        running.mul_(1 - factor).add_(lns.decode(batch.codes, batch.fmt).reshape(-1), alpha=factor)


def _with_statistics(x: LNSTensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    shape = [1, -1, *[1] * (x.dim() - 2)]
    encoded = [
        LNSTensor.from_float(v.detach(), x.fmt).codes.reshape(shape) for v in (mean, variance)
    ]
    scale = LNSTensor(_inverse_root(encoded[1], eps, x.fmt), x.fmt)
    return (x - LNSTensor(encoded[0], x.fmt)) * scale


def _batch(
    x: LNSTensor, mean: Any, variance: Any, weight: Any, bias: Any, factor: float, eps: float
) -> Tensor:
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    if count < 2:
        raise ValueError(
            f"batch norm of {count} value per channel in training: needs more than one; use a"
            " larger batch or eval()"
        )
    shape = [-1, *[1] * (x.dim() - 2)]
    y, batch_mean, batch_variance = _normalized(x, dims, eps, weight, bias, shape)
    assert batch_mean is not None
    _track(mean, batch_mean, factor)
    _track(variance, batch_variance * (count / (count - 1)), factor)
    return y


@replaces(F.batch_norm)
def batch_norm(
    input: LNSTensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, cudnn: bool = False,
) -> Tensor:  # fmt: skip
    """Normalize over examples and positions (BatchNorm), with F's and torch's signature.

    Running statistics are float32 tensors, updated in training.
    """
    if isinstance(running_mean, LNSTensor) or isinstance(running_var, LNSTensor):
        raise ValueError(
            "running statistics as LNSTensors: they are float32; convert_ leaves buffers alone,"
            " keep them so"
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
    y, mean, variance = _normalized(input, range(2, input.dim()), eps, weight, bias, shape)
    assert mean is not None
    count = math.prod(input.shape[2:])
    _track(running_mean, mean.mean(0), momentum)
    _track(running_var, variance.mean(0) * (count / max(1, count - 1)), momentum)
    return y
