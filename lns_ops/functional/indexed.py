"""Operations on codes that go by an index: table look-ups, and sums of terms with one destination.

The tables are those of :mod:`lns_ops.spec.unary_functions`.

``index_sum`` is what the gradients of gathers are made of (embedding, indexing, pooling), and it is
deterministic on every device: the terms of a destination are added in ascending order of their
position, as :func:`lns_ops.functional.sum` adds them, never by atomics.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lns_ops.cpu.arrays import flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import gather_gemm, segment_sum
from lns_ops.cpu.kernels.gather_gemm import HIGHEST, LOWEST
from lns_ops.cuda import indexed
from lns_ops.functional.library import FORMAT, cached_format, define_operator, operators_for
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference import BLOCK, LONG_SUM
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
    return operators_for(x).lookup(x, function, given, *name)  # type: ignore[no-any-return]


def power(x: Tensor, exponent: float, fmt: LNSFormat) -> Tensor:
    """Return ``x^exponent``: the logarithm times the exponent, rounded half to even.

    Raises:
        ValueError: (on a CPU) zero to a negative power, or a negative number to one that is no
            integer.
    """
    return lookup(x, "power", fmt, exponent)


def index_sum(x: Tensor, index: Tensor, rows: int, fmt: LNSFormat) -> Tensor:
    """Return ``out[r] = sum of x[i] over the i with index[i] = r``.

    The sum goes by ascending i in the order of :func:`lns_ops.functional.sum`, so that more than
    ``LONG_SUM = 4096`` terms of one destination are cut into pieces of 4096; an empty sum is zero.

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
    terms = x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
    ops = operators_for(terms)
    longest = x.shape[0]  # that a destination could have: which one has how many is data
    while longest > LONG_SUM:
        bounds, starts = _pieces(starts, terms.shape[0])
        terms = ops.segment_sum(terms, order, bounds, fmt.bits, fmt.fraction_bits)
        order = torch.arange(terms.shape[0], device=index.device)
        longest = -(-longest // LONG_SUM)
    out = ops.segment_sum(terms, order, starts, fmt.bits, fmt.fraction_bits)
    return out.reshape(rows, *x.shape[1:])  # type: ignore[no-any-return]


def _pieces(starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the bounds of the pieces that segments are cut into, and of each segment's pieces.

    A segment's pieces have ``LONG_SUM`` terms, the last one at most so many. As the number of
    pieces must not depend on data, there are as many as segments of ``count`` terms in all can
    have; those too many are empty and come last.
    """
    firsts = pad((starts.diff() + (LONG_SUM - 1)).div(LONG_SUM, rounding_mode="floor"), (1, 0))
    firsts = firsts.cumsum(0)
    segments = starts.shape[0] - 1
    pieces = torch.arange(min(segments, count) + count // LONG_SUM, device=starts.device)
    at = torch.searchsorted(firsts, pieces, right=True).sub_(1).clamp_(max=segments - 1)
    bounds = starts[at] + (pieces - firsts[at]) * LONG_SUM
    return torch.cat([torch.minimum(bounds, starts[-1]), starts[-1:]]), firsts
