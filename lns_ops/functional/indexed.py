"""Operations on codes that go by an index: table look-ups, and sums of terms with one destination.

The tables are those of :mod:`lns_ops.spec.unary_functions`.

``index_sum`` is what the gradients of gathers are made of (embedding, indexing, pooling), and it is
deterministic on every device: the terms of a destination are added in ascending order of their
position, in blocks of 64, as the contract's sum does, never by atomics.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lns_ops.cpu.arrays import flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import gather_gemm, segment_sum
from lns_ops.cpu.kernels.gather_gemm import HIGHEST, LOWEST
from lns_ops.cuda import indexed
from lns_ops.functional.library import FORMAT, OPS, cached_format, define_operator
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference import BLOCK
from lns_ops.spec.unary_functions import table, undefined

_GRAIN = 1 << 15


def _lookup_cpu(
    x: Tensor, function: str, parameters: list[float], bits: int, fraction_bits: int
) -> Tensor:
    fmt = cached_format(bits, fraction_bits)
    codes = flattened(x.contiguous().numpy())
    out = np.empty(x.shape, np.int16)
    results = table(function, tuple(parameters), fmt)
    if run(
        segment_sum.lookup,
        codes.size,
        _GRAIN,
        codes,
        out.reshape(-1),
        results,
        results.size - 1,
        undefined(fmt),
    ):
        raise ValueError(
            f"{function}{tuple(parameters) or ''} of a number for which it has no finite real"
            " value: LNS has neither infinity nor NaN; clamp or mask the input first"
        )
    return torch.from_numpy(out)


def _segment_sum_cpu(
    x: Tensor, order: Tensor, starts: Tensor, bits: int, fraction_bits: int
) -> Tensor:
    fmt, (n, width), rows = cached_format(bits, fraction_bits), x.shape, starts.numel() - 1
    out = np.zeros((rows, width), np.int16)
    if out.size:
        gauss = gather_gemm.distance_table(fraction_bits)
        grain = max(1, _GRAIN // 16 * rows // max(1, n * width))
        terms = flattened(x.contiguous().numpy())
        run(
            segment_sum.segment_sum, rows, grain, terms, out.reshape(-1), order.numpy(),
            starts.numpy(), gauss, width, fmt.bias, fmt.field_mask, LOWEST, HIGHEST, BLOCK,
        )  # fmt: skip
    return torch.from_numpy(out)


define_operator(
    "lookup",
    f"(Tensor x, str function, float[] parameters, {FORMAT}) -> Tensor",
    _lookup_cpu,
    lambda x, function, parameters, bits, fraction_bits: x.new_empty(x.shape),
    indexed.lookup,
)
define_operator(
    "segment_sum",
    f"(Tensor x, Tensor order, Tensor starts, {FORMAT}) -> Tensor",
    _segment_sum_cpu,
    lambda x, order, starts, bits, fraction_bits: x.new_empty((starts.shape[0] - 1, x.shape[1])),
    indexed.segment_sum,
)


def lookup(x: Tensor, function: str, fmt: LNSFormat, *parameters: float) -> Tensor:
    """Return ``function(x, *parameters)`` of int16 codes of any shape, rounded once.

    :mod:`lns_ops.spec.unary_functions` has the functions.

    Raises:
        ValueError: no such function, or (on a CPU) an argument for which it has no finite real
            value.
    """
    given, name = [float(p) for p in parameters], (fmt.bits, fmt.fraction_bits)
    return OPS.lookup(x, function, given, *name)  # type: ignore[no-any-return]


def power(x: Tensor, exponent: float, fmt: LNSFormat) -> Tensor:
    """Return ``x^exponent``: the logarithm times the exponent, rounded half to even.

    Raises:
        ValueError: (on a CPU) zero to a negative power, or a negative number to one that is no
            integer.
    """
    return lookup(x, "power", fmt, exponent)


def index_sum(x: Tensor, index: Tensor, rows: int, fmt: LNSFormat) -> Tensor:
    """Return ``out[r] = sum of x[i] over the i with index[i] = r``.

    The sum goes by ascending i in the contract's order; an empty sum is zero.

    Args:
        x: int16 codes ``[n, ...]``.
        index: int64 ``[n]``, each in 0 .. rows - 1 (others are left out).
        rows: the number of destinations.
        fmt: the format.

    Returns:
        int16 codes ``[rows, ...]``.

    Raises:
        ValueError: ``index`` is not as long as ``x``.
    """
    if index.numel() != x.shape[0]:
        raise ValueError(
            f"index of {index.numel()} for {x.shape[0]} rows of x: must be as many; give one index"
            " for each row"
        )
    ordered, order = torch.sort(index.reshape(-1), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(rows + 1, device=index.device))
    flat = x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
    out = OPS.segment_sum(flat, order, starts, fmt.bits, fmt.fraction_bits)
    return out.reshape(rows, *x.shape[1:])  # type: ignore[no-any-return]
