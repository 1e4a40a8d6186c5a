"""The Gaussian logarithms G+ and G-: the only place where they are computed.

The sum of two numbers in a logarithmic system is the larger one plus a correction of its
logarithm::

    log2(2^x + 2^y) = max(x, y) + G+(|x - y|)      G+(d) = log2(1 + 2^-d)
    log2(2^x - 2^y) = max(x, y) + G-(|x - y|)      G-(d) = log2(1 - 2^-d)

In units of one ulp (``2^-f`` octaves) ``d`` is an integer, and so is the correction, rounded to
nearest. The correctly rounded table *is* the definition of addition here. Every backend reads it,
or computes every entry by other means. No entry is a tie: ``2^f log2(1 +- 2^(-d/2^f))`` is an
integer at ``d = 0`` and irrational or far from one half elsewhere, which the tests check
exhaustively against arbitrary-precision arithmetic.

Source: J. N. Mitchell 1962 and N. G. Kingsbury, P. J. W. Rayner 1971 for the method; tables follow
the "ideal" rounding of M. G. Arnold's xlns.

Two more tables, for optimizers, have ``FINE_BITS = 16`` more bits below the ulp, so that changes
below half an ulp are not lost: :func:`stochastic_tables` for additions with random rounding, and
:func:`decay_table` for exponential averages of squares.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FINE_BITS = 16
"""Number of bits below the ulp in the fine tables."""
CANCEL = -(1 << 30)
"""The entry for G-(0): equal magnitudes of opposite sign cancel to exact zero.

It is below every logarithm, so adding it underflows.
"""


class GaussianTables(NamedTuple):
    """The tables ``plus[d] = round(2^f G+(d))`` and ``minus[d] = round(2^f G-(d))``.

    Both are int32, read-only and have the same length. The last entry of both is 0, and is used for
    all larger distances.
    """

    plus: NDArray[np.int32]
    minus: NDArray[np.int32]


@lru_cache(maxsize=32)
def gaussian_tables(fraction_bits: int) -> GaussianTables:
    """Return the correctly rounded tables for ``fraction_bits``.

    They have about ``(f + 1.6) 2^f`` entries (484 at f = 6, 1,093 at f = 7).
    """
    scale = 1 << fraction_bits
    octaves = np.arange((fraction_bits + 3) * scale) / scale
    plus = np.log1p(np.exp2(-octaves)) * (scale / np.log(2.0))
    minus = np.full_like(plus, CANCEL)
    minus[1:] = np.log(-np.expm1(-octaves[1:] * np.log(2.0))) * (scale / np.log(2.0))
    plus_ulps, minus_ulps = np.rint(plus).astype(np.int32), np.rint(minus).astype(np.int32)
    return _until_zero(plus_ulps, minus_ulps)


def _until_zero(plus: NDArray[np.int32], minus: NDArray[np.int32]) -> GaussianTables:
    """Return the tables up to the first entry from which both are 0, read-only."""
    length = int(np.flatnonzero(plus | minus)[-1]) + 2
    tables = GaussianTables(plus[:length].copy(), minus[:length].copy())
    for table in tables:
        table.setflags(write=False)
    return tables


@lru_cache(maxsize=32)
def stochastic_tables(fraction_bits: int) -> GaussianTables:
    """Return the tables for additions with random rounding.

    A correction is ``(entry + r) >> 16`` with ``r`` uniform in ``0 .. 2^16 - 1``.

    An entry is ``2^16 (lower + p)``. ``lower`` is the next ulp below the exact correction ``g = 2^f
    G(d)``. ``p`` is the probability of rounding up that makes the expected *value* exact, ``p =
    (2^g - 2^lower) / (2^(lower + 1) - 2^lower)`` (powers of the ulp), to within 2^-17. Exact
    corrections have p = 0. ``minus[0]``, and values below every format, saturate at -2^31, which
    every format turns into zero. The last entry of both tables is 0, and is used for all larger
    distances. They have about ``(f + 17.6) 2^f`` entries (1,507 at f = 6).
    """
    scale, unit = 1 << fraction_bits, 1 << FINE_BITS
    octaves = np.arange((fraction_bits + FINE_BITS + 3) * scale) / scale
    tables = []
    for sign in (1.0, -1.0):
        ratio = sign * np.exp2(-octaves)
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = np.log1p(ratio) * (scale / np.log(2.0))
            lower = np.floor(exact)
            up = np.expm1((exact - lower) * (np.log(2.0) / scale)) / np.expm1(np.log(2.0) / scale)
            fine = np.where(np.isfinite(exact), lower * unit + np.rint(up * unit), -np.inf)
        tables.append(np.maximum(fine, -(2.0**31)).astype(np.int32))
    return _until_zero(*tables)


class DecayTable(NamedTuple):
    """The table for one step of a root mean square, as an LNS operation with 16 bits below the ulp.

    ``r' = sqrt(beta r^2 + (1 - beta) x^2)`` is, with the logarithms ``R`` of r and ``X`` of x in
    ulps::

        2^16 R' = max(2^16 R + keep, 2^16 X + take)
                  + table[clamp(X - R, first, first + len - 1) - first]

    with ``keep = 2^16 2^f log2(beta) / 2``, ``take = 2^16 2^f log2(1 - beta) / 2``, rounded. The
    table is half the Gaussian logarithm G+ of the distance between the two; its first and last
    entries are 0. A zero r or x has a logarithm below every other. Values below every format
    saturate at -2^31.
    """

    keep: int
    take: int
    first: int
    table: NDArray[np.int32]


def longest_decay_table(fraction_bits: int) -> int:
    """Return the largest number of entries of a decay table for any beta."""
    return ((fraction_bits + FINE_BITS + 2) << fraction_bits) + 1


@lru_cache(maxsize=64)
def decay_table(beta: float, fraction_bits: int) -> DecayTable:
    """Return the table for a decay ``beta`` in [10^-6, 1).

    Raises:
        ValueError: beta is out of range.
    """
    if not 1e-6 <= beta < 1:
        raise ValueError(f"beta={beta}: must be at least 1e-6 and below 1, for example 0.999")
    scale = 1 << fraction_bits
    keep, take = (0.5 * scale * np.log(b) / np.log(2.0) for b in (beta, 1 - beta))
    # The distance of the two squares is 2 |k + take - keep| ulps; beyond `reach` the correction is
    # below half a fine unit.
    reach, centre = longest_decay_table(fraction_bits) // 2, round(keep - take)
    first = centre - reach
    octaves = 2 * np.abs(np.arange(first, centre + reach + 1) + take - keep) / scale
    table = np.rint(
        0.5 * np.log1p(np.exp2(-octaves)) * (scale / np.log(2.0)) * (1 << FINE_BITS)
    ).astype(np.int32)
    used = np.flatnonzero(table)
    low, high = int(used[0]) - 1, int(used[-1]) + 1
    table = table[low : high + 1].copy()
    table.setflags(write=False)
    fine_keep, fine_take = (max(round(v * (1 << FINE_BITS)), -(1 << 31)) for v in (keep, take))
    return DecayTable(fine_keep, fine_take, first + low, table)
