"""FLOP formulas of the products, for ``torch.utils.flop_counter.FlopCounterMode``.

A multiply-accumulate counts as two operations, as in torch.

torch's own formulas count products of LNSTensors, because the counter sees aten operators. The
formulas here are for the operators on codes, which layers of scope ``matmul`` call.

>>> import torch, lns_ops
>>> from torch.utils.flop_counter import FlopCounterMode
>>> model = lns_ops.convert_(torch.nn.Linear(4, 2), "lns12")
>>> with FlopCounterMode(display=False) as counter:
...     y = model(torch.ones(3, 4))
>>> counter.get_total_flops()  # 2 x 3 x 4 x 2
48
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from lns_ops.functional import convolution  # noqa: F401 (defines the operators)

_OPS = torch.ops.lns_ops


@register_flop_formula([_OPS.matmul, _OPS.matmul_float32, _OPS.linear])
def matmul_flops(
    x_shape: Sequence[int], y_shape: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Return ``2 M N K`` for every matrix of the batch."""
    return 2 * math.prod(x_shape) * y_shape[-1]


def _positions(out: Sequence[int], weight: Sequence[int]) -> int:
    """Count two operations for each tap, channel and output position.

    ``out`` is ``[N, outputs, *positions]``.
    """
    return 2 * math.prod(out) * math.prod(weight[1:])


@register_flop_formula(_OPS.convolution)
def convolution_flops(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Return ``2 N O P K``."""
    return _positions(out_shape, weight_shape)


@register_flop_formula(_OPS.convolution_input)
def input_gradient_flops(
    grad_shape: Sequence[int],
    weight_shape: Sequence[int],
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Return the count of the convolution; the gradient has the same count."""
    return _positions(grad_shape, weight_shape)


@register_flop_formula(_OPS.convolution_weight)
def weight_gradient_flops(
    grad_shape: Sequence[int],
    x_shape: Sequence[int],
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Return the count of the convolution; the gradient has the same count."""
    return _positions(grad_shape, out_shape)
