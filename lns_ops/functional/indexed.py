"""Operations on codes with an index: table look-ups, and sums of terms with the same destination.

The tables come from :mod:`lns_ops.spec.unary_functions`.

``index_sum`` computes the gradients of gathers (embedding, indexing, pooling). It is deterministic
on every device: the terms of a destination are added in ascending order of their position, as
:func:`lns_ops.functional.sum` adds them, without atomics. In formats of up to four fraction bits a
sum of 64 equal terms sticks; there, sums of more than 16 terms are added as integers, with the same
result in any order.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from lns_ops.cpu.arrays import flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import gather_gemm, segment_sum
from lns_ops.cpu.kernels.gather_gemm import HIGHEST, LOWEST
from lns_ops.cuda import indexed
from lns_ops.functional.elementwise import encode
from lns_ops.functional.library import FORMAT, OPS, cached_format, define_operator, operators_for
from lns_ops.spec.format import LNSFormat, decode_significands
from lns_ops.spec.reference import BLOCK, COARSE_BITS, FEW_TERMS, LONG_SUM, SUM_BITS
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
            " value: LNS has no infinity or NaN; clamp or mask the input first"
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
    """Return ``function(x, *parameters)`` for int16 codes of any shape, rounded once.

    >>> from lns_ops import functional, lns12
    >>> x = functional.encode(torch.tensor([0.0, 1.0]), lns12)
    >>> functional.decode(lookup(x, "exp", lns12), lns12)
    tensor([1.0000, 2.7085])

    :mod:`lns_ops.spec.unary_functions` lists the functions.

    Raises:
        ValueError: unknown function, or (on a CPU) an argument for which it has no finite real
            value.
    """
    given, name = [float(p) for p in parameters], (fmt.bits, fmt.fraction_bits)
    return operators_for(x).lookup(x, function, given, *name)  # type: ignore[no-any-return]


def power(x: Tensor, exponent: float, fmt: LNSFormat) -> Tensor:
    """Return ``x^exponent``: the logarithm times the exponent, rounded half to even.

    Raises:
        ValueError: (on a CPU) zero to a negative power, or a negative number to a fractional power.
    """
    return lookup(x, "power", fmt, exponent)


def index_sum(x: Tensor, index: Tensor, rows: int, fmt: LNSFormat) -> Tensor:
    """Return ``out[r] = sum of x[i] over the i with index[i] = r``.

    The terms are added by ascending i, as in :func:`lns_ops.functional.sum`, so more than
    ``LONG_SUM = 4096`` terms of one destination are split into pieces of 4096; an empty sum is
    zero. In formats of up to four fraction bits a sum of more than 16 terms is exact, and rounded
    once. :func:`lns_ops.reference.sum_by_index` is the specification.

    Args:
        x: int16 codes ``[n, ...]``.
        index: int64 ``[n]``; terms with an index outside 0 .. rows - 1 are ignored.
        rows: number of destinations.
        fmt: the format.

    Returns:
        int16 codes ``[rows, ...]``.

    Raises:
        ValueError: ``index`` is not as long as ``x``.
    """
    if index.numel() != x.shape[0]:
        raise ValueError(
            f"index of {index.numel()} for {x.shape[0]} rows of x: the numbers must be equal; give"
            " one index for each row"
        )
    exact = fmt.fraction_bits <= COARSE_BITS and x.shape[0] > FEW_TERMS
    ordered, order = torch.sort(index.reshape(-1), stable=True)
    starts = torch.searchsorted(ordered, torch.arange(rows + 1, device=index.device))
    terms = x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
    ops, counts = operators_for(terms), starts.diff()[:, None]
    given = index.reshape(-1), order, starts
    longest = x.shape[0]  # upper bound for a destination's terms; their number depends on data
    while longest > LONG_SUM:
        bounds, starts = _pieces(starts, terms.shape[0])
        terms = ops.segment_sum(terms, order, bounds, fmt.bits, fmt.fraction_bits)
        order = torch.arange(terms.shape[0], device=index.device)
        longest = -(-longest // LONG_SUM)
    out = ops.segment_sum(terms, order, starts, fmt.bits, fmt.fraction_bits)
    if exact:
        out = _with_exact_sums(out, (x.reshape(x.shape[0], -1), *given), counts, fmt)
    return out.reshape(rows, *x.shape[1:])  # type: ignore[no-any-return]


@lru_cache(maxsize=16)
def _units(fraction_bits: int) -> NDArray[np.int64]:
    """Return the powers of two between 1 and 2, in units of the exact sums."""
    return np.rint(decode_significands(fraction_bits) * 2.0**SUM_BITS).astype(np.int64)


def _with_exact_sums(
    sums: Tensor, given: tuple[Tensor, Tensor, Tensor, Tensor], counts: Tensor, fmt: LNSFormat
) -> Tensor:
    """Replace sums by index of many terms by :func:`lns_ops.reference.exact_sum`.

    ``given`` are the terms ``[n, width]``, their index, the order that sorts the index, and the
    start of each destination's terms in it. On a CPU only sums of many terms are computed twice.
    """
    x, index, order, starts = given
    many = counts > FEW_TERMS
    if operators_for(x) is OPS:
        return torch.where(many, _rounded(*_exact(x, index, len(sums), fmt), fmt), sums)
    rows = many.nonzero()[:, 0]
    if rows.numel():
        sizes = rows.numel(), x.shape[1]
        totals, highest = np.empty(sizes, np.int64), np.empty(sizes, np.int64)
        run(
            segment_sum.exact_sums, len(rows), max(1, _GRAIN // 16 * len(rows) // x.numel()),
            flattened(x.contiguous().numpy()), totals.reshape(-1), highest.reshape(-1),
            order.numpy(), starts.numpy(), rows.numpy(), _units(fmt.fraction_bits), x.shape[1],
            fmt.bias, fmt.field_mask, fmt.fraction_bits,
        )  # fmt: skip
        sums[rows] = _rounded(torch.from_numpy(totals), torch.from_numpy(highest), fmt)
    return sums


def _exact(x: Tensor, index: Tensor, rows: int, fmt: LNSFormat) -> tuple[Tensor, Tensor]:
    """Return exact sums by index of all rows, as the kernel :func:`segment_sum.exact_sums` does."""
    f, at = fmt.fraction_bits, torch.where((index < 0) | (index >= rows), rows, index)
    field, shape = x & fmt.field_mask, (rows + 1, x.shape[1])
    log = field.long() - fmt.bias
    highest = torch.full(shape, -fmt.bias, dtype=torch.int64, device=x.device).scatter_reduce(
        0, at[:, None].expand(x.shape), log, "amax"
    )
    highest >>= f
    terms = torch.from_numpy(_units(f)).to(x.device)[log & (1 << f) - 1]
    terms = (terms >> (highest.index_select(0, at) - (log >> f)).clamp_(max=62)) * (field != 0)
    terms = torch.where(x < 0, -terms, terms)
    return torch.zeros_like(highest).index_add_(0, at, terms)[:rows], highest[:rows]


def _rounded(total: Tensor, highest: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the codes of exact sums."""
    f, wide = fmt.fraction_bits, LNSFormat(fmt.fraction_bits + 9, fmt.fraction_bits)
    size = encode(total.abs().double(), wide)
    log = size.long() - wide.bias + (highest - SUM_BITS << f)
    field = (log + fmt.bias).clamp_(0, fmt.field_mask).masked_fill_(size == 0, 0)
    negative = (total < 0) & (field > 0)
    return torch.where(negative, field | fmt.sign_mask, field).to(torch.int16)


def _pieces(starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the bounds of the pieces into which segments are split, and of each segment's pieces.

    A piece has ``LONG_SUM`` terms, the last one of a segment may have fewer. The number of pieces
    must not depend on data, so it is the maximum that segments of ``count`` terms in total can
    have; surplus pieces are empty and come last.
    """
    firsts = pad((starts.diff() + (LONG_SUM - 1)).div(LONG_SUM, rounding_mode="floor"), (1, 0))
    firsts = firsts.cumsum(0)
    segments = starts.shape[0] - 1
    pieces = torch.arange(min(segments, count) + count // LONG_SUM, device=starts.device)
    at = torch.searchsorted(firsts, pieces, right=True).sub_(1).clamp_(max=segments - 1)
    bounds = starts[at] + (pieces - firsts[at]) * LONG_SUM
    return torch.cat([torch.minimum(bounds, starts[-1]), starts[-1:]]), firsts
