"""The update directions of composed optimizers in one pass on a CPU, with the same bits.

On other devices, and with options that the kernels do not support, the operations run one by one
(:mod:`lns_ops.optim.backends`). These are the definition, and the tests compare both.

Tensors are int16 codes on a CPU, contiguous and with the same shape; scalars are codes. Results are
new tensors; state changes in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lns_ops import cpu
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.elementwise import sum_table
from lns_ops.cpu.kernels import updates
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.gaussian_log import FINE_BITS, DecayTable
from lns_ops.spec.reference import WEIGHT_SLOT

_GRAIN = 1 << 13


def _flat(*tensors: Tensor) -> list[Any]:
    return [t.contiguous().numpy().reshape(-1) for t in tensors]


def _tables(fmt: LNSFormat) -> tuple[Any, ...]:
    table = sum_table(fmt.fraction_bits)
    return table, table.size // 2 - 1, fmt.bias, fmt.field_mask


def nesterov(
    weight: Tensor, grad: Tensor, buffer: Tensor, momentum: int, decay: int, fmt: LNSFormat
) -> Tensor:
    """Update the buffer and return Nesterov's direction ``g + momentum buffer``.

    ``g = grad + decay weight``, ``buffer = momentum buffer + g``.
    """
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    run(
        updates.nesterov,
        weight.numel(),
        _GRAIN,
        *_flat(weight, grad, buffer, out),
        *_tables(fmt),
        momentum,
        decay,
        decay != 0,
    )
    return out


def lion(
    weight: Tensor,
    grad: Tensor,
    average: Tensor,
    direction: tuple[int, int],
    kept: tuple[int, int],
    decay: int,
    fmt: LNSFormat,
) -> Tensor:
    """Return Lion's ``sign(a average + b grad) + decay weight`` with ``direction = (a, b)``.

    Then ``average = c average + d grad`` with ``kept = (c, d)``, in place.
    """
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    arrays = _flat(weight, grad, average, out)
    run(
        updates.lion, weight.numel(), _GRAIN, *arrays, *_tables(fmt), *direction, *kept, decay,
        decay != 0,
    )  # fmt: skip
    return out


def normed(
    weight: Tensor, grad: Tensor, root: Tensor, residue: Tensor, squares: DecayTable, decay: int,
    eps: int, fmt: LNSFormat, *, factor: int | None = None, bound: int | None = None,
) -> Tensor:  # fmt: skip
    """Update the root with ``g = grad + decay weight`` and return ``(g / (root + eps)) factor``,
    at most ``bound`` in magnitude.

    Args:
        root, residue: as for :func:`lns_ops.optim.moments.follow_`.
        squares: the table by which the root follows ``g``.
    """
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    table, *constants = _tables(fmt)
    run(
        updates.normed, weight.numel(), _GRAIN, *_flat(weight, grad, root, residue, out), table,
        squares.table, *constants, decay, decay != 0, squares.first, squares.keep, squares.take,
        eps, fmt.bias if factor is None else factor, fmt.field_mask if bound is None else bound,
    )  # fmt: skip
    return out


def multiply(
    weight: Tensor,
    x: Tensor,
    table: Tensor,
    residue: Tensor | None,
    limit: int | None,
    fmt: LNSFormat,
    *,
    key: int | None,
    step: int,
) -> None:
    """Compute ``weight *= 2^(-sign(weight) octaves(x))`` in place.

    The definition is :func:`lns_ops.optim.moments.multiply_`.

    Args:
        table: the octaves for each of the 2^bits words, int64 in 2^-16 ulps.
        limit: a code, the largest magnitude allowed.
    """
    n = weight.numel()
    bits = (
        cpu.random_bits(n, key, step, WEIGHT_SLOT)
        if key is not None
        else np.full(n, 1 << FINE_BITS - 1, np.uint16)
    )
    lost = np.zeros(n, np.int16) if residue is None else residue.numpy().reshape(-1)
    run(
        updates.multiply, n, _GRAIN, *_flat(weight, x), lost, bits, table.numpy(),
        (1 << fmt.bits) - 1, fmt.bias, fmt.field_mask, fmt.field_mask if limit is None else limit,
    )  # fmt: skip
