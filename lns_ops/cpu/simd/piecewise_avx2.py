"""The Gaussian-logarithm tables as straight lines with tables of 16 bytes, exact in every entry.

:mod:`lns_ops.cpu.simd.piecewise_avx512` does the same for processors whose byte permutations have
64 entries. With AVX2 they have 16, so every further 16 cells cost instructions, and the cut is
designed to need few cells. Words and distances ``D`` (odd if the signs differ) are as there::

    R      = scale max(reach - D, 0)
    fourth = R^4, curve = R^8                 repeated squares, 16 bits kept of each: like 2^-d, so
                                              that G+ and G- of it are nearly straight
    window = (fourth multiplier) >> 16        0 .. 127: the low ``fine`` bits inside one of 8 or 16
                                              coarse windows
    cell   = base[coarse, parity] + (window & mask[coarse, parity])
    value  = (A[cell] + (B[cell] curve + 2^14 >> 15)) & -u

The mask determines how often a coarse window is halved, as its lines need; the bases place the
cells without gaps. If the signs differ and ``d < 16``, 16 bits of A are XORed with a table indexed
by d, which makes the value correct there, too, for any cell and line. The table's first entry makes
the value -32768: cancellation.

Tables longer than 16 bytes are looked up 16 bytes at a time, with an index that decreases from
table to table. A look-up gives zero for a negative index, and otherwise uses only the low four
bits. So each table is stored as the XOR with the one before, and the XOR of all look-ups is the
entry. Cells whose A has a high byte are at the end, so that there are fewer tables for the high
bytes.

``reach``, ``scale`` and ``multiplier`` were found by a random search for few cells. The lines are
computed here, and every entry of both tables is checked before use (about 0.1 s at f = 7). The
smallest numbers of lines, with arbitrary ends, are 7 for G+ and 13 for G- beyond d = 16 at f = 6,
and 13 and 28 at f = 7; for lines in D they are 13 and 19, 22 and 37.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu.simd.piecewise_avx512 import CANCEL_WORD, fit_line
from lns_ops.spec.gaussian_log import gaussian_tables

ENTRIES = 16
"""Number of bytes of one look-up, and of distances with a table of their own."""

_I64 = NDArray[np.int64]


class Cut(NamedTuple):
    """How distances are divided into cells; the module docstring describes the method.

    ``cells`` is 32 or 64.
    """

    unit_shift: int
    reach: int
    scale: int
    multiplier: int
    cells: int

    @property
    def large(self) -> bool:
        """Whether there are 64 cells and 16 coarse windows, instead of 32 and 8."""
        return self.cells == 64

    @property
    def fine(self) -> int:
        """The number of window bits inside a coarse window."""
        return 3 if self.large else 4

    @property
    def plain(self) -> int:
        """The first cell whose A may have a high byte."""
        return HIGH_FROM[self.large]


HIGH_FROM = {False: 16, True: 32}
"""The first cell that may have a high byte of A, by whether the cut is large."""

_CUTS = {
    3: Cut(2, 336, 177, 164, 32),
    4: Cut(2, 706, 84, 166, 32),
    5: Cut(2, 1481, 39, 186, 32),
    6: Cut(2, 4084, 13, 190, 32),
    7: Cut(1, 4215, 12, 348, 64),
}


class Pieces(NamedTuple):
    """The pieces of one format.

    Attributes:
        cut: the cut.
        base: first cell by (parity, coarse window), int64 (2, 16).
        mask: used bits of the window, indexed as ``base``.
        offset: A by cell, int64 in 16 bits.
        slope: B by cell, as ``offset``.
        change: the XOR mask for A by distance if signs differ, int64 in 16 bits (near,).
        length: distance, in words, from which both corrections are 0.
    """

    cut: Cut
    base: _I64
    mask: _I64
    offset: _I64
    slope: _I64
    change: _I64
    length: int


def supported(fraction_bits: int) -> bool:
    """Return whether exact pieces are known for this many fraction bits."""
    return fraction_bits in _CUTS


def _window_and_curve(cut: Cut, distance: _I64, parity: int) -> tuple[_I64, _I64]:
    remaining = np.maximum(cut.reach - ((distance << cut.unit_shift) + parity), 0) * cut.scale
    square = remaining * remaining >> 16
    fourth = square * square >> 16
    return fourth * cut.multiplier >> 16, fourth * fourth >> 16


def _wanted(fraction_bits: int, cut: Cut, parity: int) -> _I64:
    """Return the exact correction in words by distance, up to beyond the end of the pieces."""
    table = gaussian_tables(fraction_bits)[parity].astype(np.int64)
    distance = np.arange(max(len(table), cut.reach >> cut.unit_shift) + 8)
    values = (
        np.where(distance < len(table), table[np.minimum(distance, len(table) - 1)], 0)
        << cut.unit_shift
    )
    wanted: _I64 = np.maximum(values, CANCEL_WORD)
    return wanted


class _Part(NamedTuple):
    """A coarse window for one parity: the used bits of the window, and a line for each value."""

    parity: int
    coarse: int
    mask: int
    lines: dict[int, tuple[int, int]]


def _part(cut: Cut, parity: int, coarse: int, window: _I64, curve: _I64, wanted: _I64) -> _Part:
    """Return the coarsest division of a coarse window for which lines exist."""
    for halvings in range(cut.fine + 1):
        mask = (1 << cut.fine) - (1 << cut.fine - halvings)
        chosen = window & mask
        lines = {
            int(cell): fit_line(curve[chosen == cell], wanted[chosen == cell], 1 << cut.unit_shift)
            for cell in np.unique(chosen)
        }
        fitting = {cell: found for cell, found in lines.items() if found is not None}
        if len(fitting) == len(lines):
            return _Part(parity, coarse, mask, fitting)
    raise AssertionError("a cut in the list has a window that no line fits")


def _parts(fraction_bits: int, cut: Cut) -> list[_Part]:
    """Return the coarse windows of both parities, those with most cells first."""
    found = []
    for parity in (0, 1):
        wanted = _wanted(fraction_bits, cut, parity)
        distance = np.arange(len(wanted))
        window, curve = _window_and_curve(cut, distance, parity)
        on_line = distance >= (ENTRIES if parity else 0)
        for coarse in np.unique(window[on_line] >> cut.fine):
            here = on_line & (window >> cut.fine == coarse)
            found.append(_part(cut, parity, int(coarse), window[here], curve[here], wanted[here]))
    return sorted(found, key=lambda part: -len(part.lines))


@lru_cache(maxsize=8)
def pieces(fraction_bits: int) -> Pieces:
    """Return the pieces for ``fraction_bits``, checked against every entry of the tables.

    Raises:
        KeyError: not :func:`supported`.
    """
    cut = _CUTS[fraction_bits]
    base, mask = np.zeros((2, ENTRIES), np.int64), np.zeros((2, ENTRIES), np.int64)
    offset, slope = np.zeros(cut.cells, np.int64), np.zeros(cut.cells, np.int64)
    free = set(range(cut.cells))
    for part in _parts(fraction_bits, cut):
        lowest = 0 if all(0 <= offset < 256 for offset, _ in part.lines.values()) else cut.plain
        first = next(
            cell
            for cell in range(lowest, cut.cells)
            if free.issuperset(cell + step for step in part.lines)
        )
        free.difference_update(first + step for step in part.lines)
        base[part.parity, part.coarse], mask[part.parity, part.coarse] = first, part.mask
        for step, found in part.lines.items():
            offset[first + step], slope[first + step] = found
    length = len(gaussian_tables(fraction_bits).plus) << cut.unit_shift
    made = Pieces(cut, base, mask, offset, slope, np.zeros(ENTRIES, np.int64), length)
    near = np.arange(ENTRIES)
    cell, line_part = _cell_and_line(made, near, 1)
    change = ((_wanted(fraction_bits, cut, 1)[:ENTRIES] - line_part) ^ offset[cell]) & 0xFFFF
    made = made._replace(change=change)
    for parity in (0, 1):
        wanted = _wanted(fraction_bits, cut, parity)
        assert np.array_equal(evaluate(made, np.arange(len(wanted)), parity), wanted)
    return made


def _cell_and_line(made: Pieces, distance: _I64, parity: int) -> tuple[_I64, _I64]:
    """Return cells, and the rounded ``B curve``."""
    window, curve = _window_and_curve(made.cut, distance, parity)
    coarse = window >> made.cut.fine
    cell = made.base[parity][coarse] + (window & made.mask[parity][coarse])
    return cell, (made.slope[cell] * curve + (1 << 14)) >> 15


def evaluate(made: Pieces, distance: _I64, parity: int) -> _I64:
    """Return the result of the vector kernel for each distance in ulps, int64.

    It is ``u G+`` (parity 0) or ``u G-`` (parity 1).
    """
    cell, line_part = _cell_and_line(made, distance, parity)
    offset = made.offset[cell]
    if parity:
        offset = offset ^ np.where(
            distance < ENTRIES, made.change[np.minimum(distance, ENTRIES - 1)], 0
        )
    value: _I64 = (offset + line_part).astype(np.int16).astype(np.int64) & -(
        1 << made.cut.unit_shift
    )
    return value
