"""The Gaussian-logarithm tables as straight lines in vector registers, exact in every entry.

A vector kernel has no room for a table of a thousand entries, but G+ and G- are smooth. If they are
divided into pieces, each piece of the rounded curve equals a rounded straight line *exactly*. This
file computes the pieces and checks them against the tables; the vector kernel
(:mod:`lns_ops.cpu.simd.gemm`) evaluates them on 16-bit lanes.

Words. A number is ``w = u log + s`` with the unit ``u = 2^unit_shift`` and ``s`` = 1 for negative.
The distance of two words is ``D = u d + (1 if the signs differ else 0)``, and the correction is ``u
G+(d)`` or ``u G-(d)``. In 16-bit arithmetic::

    R     = max(reach - D, 0)                 counted from the far end, where both curves are flat
    square = (scale R)^2 >> 16                changes fastest at small distances: narrow pieces
                                              there, wide pieces far out
    cell  = one of 64, from the top bits of ``square`` and the parity of D
    value = (A[cell] + (B[cell] scale R + 2^14 >> 15)) & -u

If the signs differ and ``d < near``, an exact table of 64 entries is used, because G- is too steep
for a line near zero. Its first entry, -32768, moves the sum of two cancelling numbers down to the
word of zero.

There are two ways from ``square`` to the cell. *Direct* (f <= 6): ``square`` has at most 64 values
and its lowest bit is replaced by the parity. *Mapped* (f = 7): six bits of ``square`` index one of
two byte tables (one per parity), which merge pieces so that both signs together need at most 64
cells.

``reach``, ``scale`` and the window were found by exhaustive search. A and B are computed here for
each piece, and every entry of both tables is checked before use. Limits: 3 <= f <= 7. At f = 8, G-
alone needs 58 pieces beyond distance 64 and G+ 39, for any placement.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lns_ops.spec.gaussian_log import gaussian_tables

LANES = 32
CELLS = 64
NEAR_ENTRIES = 64
CANCEL_WORD = -32768

_I64 = NDArray[np.int64]


class Cells(NamedTuple):
    """How distances are divided into cells; the module docstring describes the method.

    ``window`` is the lowest used bit of ``square``, or -1 for direct.
    """

    unit_shift: int
    reach: int
    scale: int
    window: int


_CELLS = {
    3: Cells(4, 660, 1, -1),
    4: Cells(4, 1426, 1, -1),
    5: Cells(3, 1698, 1, -1),
    6: Cells(2, 1974, 1, -1),
    7: Cells(1, 2247, 5, 5),
}


class Segments(NamedTuple):
    """The pieces of one format.

    Attributes:
        shape: the cut.
        near: smaller distances use the exact table if signs differ, ulps.
        offset: A by cell, int16 (64,).
        slope: B by cell, int16 (64,).
        exact: ``u G-(d)`` by distance, int16 (64,).
        cell_of: cell by (parity, window) of a mapped shape, uint8 (2, 64); else zeros.
    """

    shape: Cells
    near: int
    offset: NDArray[np.int16]
    slope: NDArray[np.int16]
    exact: NDArray[np.int16]
    cell_of: NDArray[np.uint8]


def supported(fraction_bits: int) -> bool:
    """Return whether exact pieces are known for this many fraction bits."""
    return fraction_bits in _CELLS


def fit_line(remaining: _I64, wanted: _I64, unit: int) -> tuple[int, int] | None:
    """Return a line ``A, B`` that gives the wanted corrections, or None.

    ``A + (B remaining + 2^14 >> 15)`` is in ``wanted .. wanted + unit - 1`` everywhere.
    """
    if np.all(wanted == wanted[0]):
        return int(wanted[0]), 0
    span = int(remaining[0] - remaining[-1])
    if span == 0:
        return None
    middle, slack = (wanted[0] - wanted[-1]) / span * 32768, (unit + 0.5) / span * 32768
    low, high = max(-32768, int(middle - slack)), min(32767, int(middle + slack) + 1)
    slopes = np.arange(low, high + 1, max(1, (high - low) // 1500))
    needed = wanted - ((slopes[:, None] * remaining + (1 << 14)) >> 15)
    most, least = needed.max(axis=1), needed.min(axis=1)
    fitting = np.flatnonzero(most - least < unit)
    if not fitting.size:
        return None
    best = fitting[len(fitting) // 2]
    return int(most[best] + (unit - 1 - most[best] + least[best]) // 2), int(slopes[best])


class _Curve(NamedTuple):
    """The distances for one parity: remaining (scale R), window, wanted correction.

    ``first`` is the first distance on a line.
    """

    remaining: _I64
    window: _I64
    wanted: _I64
    first: int


def _square_window(remaining: _I64, shape: Cells) -> _I64:
    return (remaining * remaining >> 16) >> (shape.window if shape.window >= 0 else 1)


def _curve(fraction_bits: int, shape: Cells, parity: int) -> _Curve:
    table = gaussian_tables(fraction_bits)[parity].astype(np.int64)
    d = np.arange((shape.reach >> shape.unit_shift) + 8)
    remaining = np.maximum(shape.reach - ((d << shape.unit_shift) + parity), 0) * shape.scale
    window = _square_window(remaining, shape)
    wanted = np.where(d < len(table), table[np.minimum(d, len(table) - 1)], 0) << shape.unit_shift
    edges = np.flatnonzero(np.diff(window)) + 1
    first = int(edges[edges <= NEAR_ENTRIES].max()) if parity else 0
    return _Curve(remaining, window, wanted, first)


def _pieces(curve: _Curve, unit: int, merge: bool) -> list[tuple[int, int, int, int]]:
    """Return ``(first window, last window, A, B)`` per piece, by ascending distance; windows
    descend.
    """
    edges = np.concatenate([[0], np.flatnonzero(np.diff(curve.window)) + 1, [len(curve.window)]])
    edges = edges[edges >= curve.first]
    pieces: list[tuple[int, int, int, int]] = []
    start = int(edges[0])
    for left, right in itertools.pairwise(edges):
        line = (
            fit_line(curve.remaining[start:right], curve.wanted[start:right], unit)
            if merge and pieces
            else None
        )
        if line is not None:
            pieces.pop()
        else:
            start = int(left)
            line = fit_line(curve.remaining[start:right], curve.wanted[start:right], unit)
            assert line is not None, "a shape in the list has a piece that no line fits"
        pieces.append((int(curve.window[start]), int(curve.window[left]), *line))
    return pieces


@lru_cache(maxsize=8)
def segments(fraction_bits: int) -> Segments:
    """Return the pieces for ``fraction_bits``, checked against every entry of the tables.

    Raises:
        KeyError: not :func:`supported`.
    """
    shape = _CELLS[fraction_bits]
    mapped = shape.window >= 0
    offset, slope = np.zeros(CELLS, np.int16), np.zeros(CELLS, np.int16)
    cell_of = np.zeros((2, CELLS), np.uint8)
    curves = [_curve(fraction_bits, shape, parity) for parity in (0, 1)]
    used = 1  # cell 0 of a mapped shape is empty, for small distances and different signs
    for parity, curve in enumerate(curves):
        for high, low, a, b in _pieces(curve, 1 << shape.unit_shift, mapped):
            cell = used if mapped else 2 * high + parity
            used += 1
            assert cell < CELLS
            offset[cell], slope[cell] = a, b
            cell_of[parity, low : high + 1] = cell
    exact = np.zeros(NEAR_ENTRIES, np.int16)
    exact[: curves[1].first] = np.maximum(curves[1].wanted[: curves[1].first], CANCEL_WORD)
    found = Segments(
        shape, curves[1].first, offset, slope, exact, cell_of if mapped else np.zeros_like(cell_of)
    )
    for parity, curve in enumerate(curves):
        distance = np.arange(len(curve.wanted))
        assert np.array_equal(
            evaluate(found, distance, parity), np.maximum(curve.wanted, CANCEL_WORD)
        )
    return found


def evaluate(pieces: Segments, distance: _I64, parity: int) -> _I64:
    """Return the result of the vector kernel for each distance in ulps, int64.

    It is ``u G+`` (parity 0) or ``u G-`` (parity 1).
    """
    shape = pieces.shape
    remaining = np.maximum(shape.reach - ((distance << shape.unit_shift) + parity), 0) * shape.scale
    window = _square_window(remaining, shape)
    cell = (
        pieces.cell_of[parity][window & 63].astype(np.int64)
        if shape.window >= 0
        else 2 * window + parity
    )
    line = pieces.offset[cell].astype(np.int64) + (
        (pieces.slope[cell] * remaining + (1 << 14)) >> 15
    )
    value: _I64 = line & -(1 << shape.unit_shift)
    if parity:
        value |= np.where(distance < pieces.near, pieces.exact[distance & 63].astype(np.int64), 0)
    return value
