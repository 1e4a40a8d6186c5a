"""The Gaussian logarithms G+ and G-: the only place where they are computed.

The sum of two numbers in a logarithmic system is the larger one plus a correction of its logarithm::

    log2(2^x + 2^y) = max(x, y) + G+(|x - y|)      G+(d) = log2(1 + 2^-d)
    log2(2^x - 2^y) = max(x, y) + G-(|x - y|)      G-(d) = log2(1 - 2^-d)

In units of one ulp (``2^-f`` octaves), ``d`` is an integer and so is the correction, rounded to nearest; the correctly rounded
table *is* the definition of addition here, and every backend reads it (or evaluates it by other means that equal it in
every entry). No entry is a tie: ``2^f log2(1 +- 2^(-d/2^f))`` is an integer at ``d = 0`` and irrational or far from one half
elsewhere, which the tests check exhaustively against arbitrary-precision arithmetic.

Source: J. N. Mitchell 1962 and N. G. Kingsbury, P. J. W. Rayner 1971 for the method; tables follow the "ideal" rounding of
M. G. Arnold's xlns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CANCEL = -(1 << 30)
"""G-(0): equal magnitudes of opposite sign cancel to exact zero. Below every logarithm, so adding it underflows."""


class GaussianTables(NamedTuple):
    """``plus[d] = round(2^f G+(d))`` and ``minus[d] = round(2^f G-(d))``, int32, read-only.

    Both have the same length; the last entry of both is 0 and stands for every larger distance.
    """

    plus: NDArray[np.int32]
    minus: NDArray[np.int32]


@lru_cache(maxsize=32)
def gaussian_tables(fraction_bits: int) -> GaussianTables:
    """Correctly rounded tables for ``fraction_bits``; about ``(f + 1.6) 2^f`` entries (484 at f = 6, 1,093 at f = 7)."""
    scale = 1 << fraction_bits
    octaves = np.arange((fraction_bits + 3) * scale) / scale
    plus = np.log1p(np.exp2(-octaves)) * (scale / np.log(2.0))
    minus = np.full_like(plus, CANCEL)
    minus[1:] = np.log(-np.expm1(-octaves[1:] * np.log(2.0))) * (scale / np.log(2.0))
    plus_ulps, minus_ulps = np.rint(plus).astype(np.int32), np.rint(minus).astype(np.int32)
    length = int(np.flatnonzero(plus_ulps | minus_ulps)[-1]) + 2
    tables = GaussianTables(plus_ulps[:length].copy(), minus_ulps[:length].copy())
    for table in tables:
        table.setflags(write=False)
    return tables
