"""Maxima over windows of images as a custom operator: values and places, exact.

If values are equal, the first one counts. On a CPU a compiled kernel is used
(:mod:`lns_ops.cpu.kernels.max_pool`); on a GPU torch's float32 kernel, because float32 represents
the order keys exactly.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lns_ops.cpu.arrays import flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import max_pool
from lns_ops.functional.elementwise import order_key
from lns_ops.functional.library import FORMAT, cached_format, define_operator, operators_for
from lns_ops.spec.format import LNSFormat

_WINDOWS = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_MOST_TAPS = 1 << 16
_WIDEST = 1 << 12
"""Maximum number of values of a padded row; the kernel keeps eight bytes for each on the stack."""


def _places(x: Tensor, window: Any) -> Tensor:
    """Return torch's own indices of the maxima of float32 values.

    For an empty tensor only the shape is meaningful.
    """
    indices: Tensor = torch.ops.aten.max_pool2d_with_indices(x, *window)[1]
    return indices


def _from_floats(x: Tensor, window: Any, fmt: LNSFormat) -> tuple[Tensor, Tensor]:
    indices = _places(order_key(x, fmt).to(torch.float32), window)
    picked = x.flatten(-2).gather(-1, indices.flatten(-2))
    return picked.reshape(indices.shape), indices


def _on_cpu(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    bits: int,
    fraction_bits: int,
) -> tuple[Tensor, Tensor]:
    fmt, window = cached_format(bits, fraction_bits), (kernel, stride, padding, dilation, ceil_mode)
    shape = _places(torch.empty(x.shape, device="meta"), window).shape
    if math.prod(kernel) >= _MOST_TAPS or x.shape[-1] + 2 * padding[1] > _WIDEST:
        return _from_floats(x, window, fmt)
    out, indices = np.empty(shape, np.int16), np.empty(shape, np.int64)
    planes = math.prod(shape[:-2])
    grain = max(1, (1 << 15) // max(1, math.prod(x.shape[-2:])))
    empty = run(
        max_pool.max_pool, planes, grain, flattened(x.contiguous().numpy()), out.reshape(-1),
        indices.reshape(-1), *x.shape[-2:], *shape[-2:], *kernel, *stride, *padding, *dilation,
        fmt.field_mask,
    )  # fmt: skip
    if empty:
        raise ValueError(
            f"max pooling of {x.shape[-2]} x {x.shape[-1]} values with kernel {kernel}, padding"
            f" {padding}, dilation {dilation}: a window is entirely in the padding, so its maximum"
            " is -infinity; use less padding or dilation"
        )
    return torch.from_numpy(out), torch.from_numpy(indices)


def _on_cuda(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *window, bits, fraction_bits = arguments
    return _from_floats(x, window, cached_format(bits, fraction_bits))


def _fake(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    indices = _places(x.new_empty(x.shape, dtype=torch.float32), arguments[:-2])
    return x.new_empty(indices.shape), torch.empty_like(indices)


define_operator(
    "max_pool2d", f"(Tensor x, {_WINDOWS}, {FORMAT}) -> (Tensor, Tensor)", _on_cpu, _fake, _on_cuda
)


def max_pool2d(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    fmt: LNSFormat,
) -> tuple[Tensor, Tensor]:
    """Return the maxima over windows, and their places ``y W + x``.

    Args:
        x: int16 codes ``[..., H, W]`` of three or four dimensions.
        kernel, stride, padding, dilation: two numbers each, as torch's.
        ceil_mode: whether windows may start within the last stride.
        fmt: the format.

    Raises:
        RuntimeError: from torch, for arguments that do not match.
        ValueError: (on a CPU) a window contains only padding.
    """
    geometry = (kernel, stride, padding, dilation, ceil_mode)
    kernels = operators_for(x)
    found: tuple[Tensor, Tensor] = kernels.max_pool2d(x, *geometry, fmt.bits, fmt.fraction_bits)
    return found
