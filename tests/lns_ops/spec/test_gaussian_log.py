"""The Gaussian-logarithm tables compared with arbitrary-precision arithmetic: every entry is
correctly rounded, without ties."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from lns_ops.spec.gaussian_log import CANCEL, gaussian_tables


def exact_log_ratio(fraction_bits: int, distance: int, sign: int) -> mpmath.mpf:
    """``2^f log2(1 + sign 2^(-distance / 2^f))`` to 30 digits."""
    with mpmath.workdps(30):
        scale = mpmath.mpf(1 << fraction_bits)
        return scale * mpmath.log1p(sign * mpmath.power(2, -distance / scale)) / mpmath.log(2)


def check_tables(fraction_bits: int) -> None:
    plus, minus = gaussian_tables(fraction_bits)
    assert plus[0] == 1 << fraction_bits
    assert minus[0] == CANCEL
    half = mpmath.mpf(1) / 2
    for sign, table in ((1, plus), (-1, minus)):
        for distance in range(1, len(table)):
            error = abs(exact_log_ratio(fraction_bits, distance, sign) - int(table[distance]))
            # Strictly below a half: with 30 digits, a margin of 1e-15 excludes ties and wrong
            # neighbours.
            assert error < half - mpmath.mpf("1e-15"), (fraction_bits, distance, sign)


@pytest.mark.parametrize("fraction_bits", range(11))
def test_tables_are_correctly_rounded(fraction_bits: int) -> None:
    check_tables(fraction_bits)


@pytest.mark.slow
@pytest.mark.parametrize("fraction_bits", range(11, 15))
def test_large_tables_are_correctly_rounded(fraction_bits: int) -> None:
    check_tables(fraction_bits)


@pytest.mark.parametrize("fraction_bits", range(15))
def test_table_ends_where_both_corrections_vanish(fraction_bits: int) -> None:
    plus, minus = gaussian_tables(fraction_bits)
    assert len(plus) == len(minus)
    assert plus[-1] == 0
    assert minus[-1] == 0
    assert plus[-2] != 0 or minus[-2] != 0
    # Beyond the table |log2(1 - 2^-d)| decreases, so checking its end is enough.
    assert abs(exact_log_ratio(fraction_bits, len(plus) - 1, -1)) < 0.5


@pytest.mark.parametrize("fraction_bits", range(15))
def test_tables_are_monotone_and_read_only(fraction_bits: int) -> None:
    plus, minus = gaussian_tables(fraction_bits)
    assert np.all(np.diff(plus) <= 0)
    assert np.all(np.diff(minus) >= 0)
    assert not plus.flags.writeable
    assert not minus.flags.writeable
