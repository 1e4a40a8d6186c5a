"""Operations on codes that go by an index: functions from tables (:mod:`lns_ops.lookup`) and sums of the terms with one destination.

``index_sum`` is what the gradients of gathers are made of (embedding, indexing, pooling), and it is deterministic on every device: the
terms of a destination are added in ascending order of their position, in blocks of 64, as the contract's sum does, never by atomics.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lns_ops import _gather, _indexed, cpu, cuda_indexed
from lns_ops._pool import run
from lns_ops.format import LNSFormat
from lns_ops.functional import _FORMAT, _OPS, _define, _format
from lns_ops.lookup import table, undefined
from lns_ops.reference import BLOCK

_GRAIN = 1 << 15


def _lookup_cpu(x: Tensor, function: str, parameters: list[float], bits: int, fraction_bits: int) -> Tensor:
    fmt = _format(bits, fraction_bits)
    codes = cpu._flat(x.contiguous().numpy())
    out = np.empty(x.shape, np.int16)
    results = table(function, tuple(parameters), fmt)
    if run(_indexed.lookup, codes.size, _GRAIN, codes, out.reshape(-1), results, results.size - 1, undefined(fmt)):
        raise ValueError(
            f"{function}{tuple(parameters) or ''} of a number for which it has no finite real value: LNS has neither infinity nor NaN; "
            "clamp or mask the input first"
        )
    return torch.from_numpy(out)


def _segment_sum_cpu(x: Tensor, order: Tensor, starts: Tensor, bits: int, fraction_bits: int) -> Tensor:
    fmt, (n, width), rows = _format(bits, fraction_bits), x.shape, starts.numel() - 1
    out = np.zeros((rows, width), np.int16)
    if out.size:
        gauss = _gather.distance_table(fraction_bits)
        grain = max(1, _GRAIN // 16 * rows // max(1, n * width))
        terms = cpu._flat(x.contiguous().numpy())
        run(_indexed.segment_sum, rows, grain, terms, out.reshape(-1), order.numpy(), starts.numpy(), gauss, width, fmt.bias,
            fmt.field_mask, cpu._LOWEST, cpu._HIGHEST, BLOCK)  # fmt: skip
    return torch.from_numpy(out)


_define(
    "lookup",
    f"(Tensor x, str function, float[] parameters, {_FORMAT}) -> Tensor",
    _lookup_cpu,
    lambda x, function, parameters, bits, fraction_bits: x.new_empty(x.shape),
    cuda_indexed.lookup,
)
_define(
    "segment_sum",
    f"(Tensor x, Tensor order, Tensor starts, {_FORMAT}) -> Tensor",
    _segment_sum_cpu,
    lambda x, order, starts, bits, fraction_bits: x.new_empty((starts.shape[0] - 1, x.shape[1])),
    cuda_indexed.segment_sum,
)


def lookup(x: Tensor, function: str, fmt: LNSFormat, *parameters: float) -> Tensor:
    """``function(x, *parameters)`` of int16 codes of any shape, rounded once; see :mod:`lns_ops.lookup`.

    Raises:
        ValueError: no such function, or (on a CPU) an argument for which it has no finite real value.
    """
    return _OPS.lookup(x, function, [float(p) for p in parameters], fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def power(x: Tensor, exponent: float, fmt: LNSFormat) -> Tensor:
    """``x^exponent``: the logarithm times the exponent, rounded half to even.

    Raises:
        ValueError: (on a CPU) zero to a negative power, or a negative number to one that is no integer.
    """
    return lookup(x, "power", fmt, exponent)


def index_sum(x: Tensor, index: Tensor, rows: int, fmt: LNSFormat) -> Tensor:
    """``out[r] = sum of x[i] over the i with index[i] = r``, i ascending, in the contract's order; an empty sum is zero.

    Args:
        x: int16 codes ``[n, ...]``.
        index: int64 ``[n]``, each in 0 .. rows - 1 (others are left out).
        rows: the number of destinations.
        fmt: the format.

    Returns:
        int16 codes ``[rows, ...]``.
    """
    ordered, order = torch.sort(index.reshape(-1), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(rows + 1, device=index.device))
    flat = x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
    out = _OPS.segment_sum(flat, order, starts, fmt.bits, fmt.fraction_bits)
    return out.reshape(rows, *x.shape[1:])  # type: ignore[no-any-return]
