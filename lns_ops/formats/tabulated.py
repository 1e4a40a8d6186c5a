"""Formats that are defined by a sorted list of values and a rule for rounding between neighbours.

A list of at most 2^16 values can describe any format of at most 16 bits. Rounding to nearest is a
search among *thresholds*: the i-th threshold is the smallest float32 that rounds to the value after
the i-th. So ties, and boundaries that float32 cannot represent, need no extra work, and every
device finds the same value, because it only compares. If a table indexed by float32's leading bits
leaves one threshold to compare with, it replaces the binary search, which takes 4 to 8 times as
long on a CPU. A boundary between two neighbours need not be their mean: posits and takums round in
their bit string (:mod:`lns_ops.formats.tapered`).

Stochastic rounding chooses one of the two neighbours in proportion to the distance, independent of
the boundary, so that the expected value is exact. A value beyond the list saturates.

:class:`Table` reads such a list from a file. Rounding to nearest is one kernel on GPUs with CuPy.
Limits: on CPUs, at random, and for lists without such a table it uses torch operations.
"""

from __future__ import annotations

import hashlib
import os
import stat
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lns_ops.formats.base import Encoded, ErrorModel, NumberFormat, as_float32, on_gpu
from lns_ops.spec.format import NonFiniteError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    Floats = NDArray[np.float64]

LONGEST = 1 << 16
"""Maximum number of values of a list."""
MOST_CELLS = 1 << 21
"""Maximum number of entries of the table that replaces a binary search."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid:
    """The values of a format and the rules for rounding to them.

    Attributes:
        levels: float32, shape (N,), strictly increasing.
        boundaries: float64, shape (N - 1,): where rounding changes to the next level.
        thresholds: float32, shape (N - 1,): the smallest numbers that round to the next level.
        codes: integers, shape (N,): the code of each level.
        decoded: float32: the values of all codes, the smallest code first.
        unit: the unit roundoff of the levels from 1 to ``full_scale``; 0 for even steps.
        full_scale: the magnitude to which a scale maps a group's largest magnitude.
    """

    levels: NDArray[np.float32]
    boundaries: NDArray[np.float64]
    thresholds: NDArray[np.float32]
    codes: NDArray[np.int64]
    decoded: NDArray[np.float32]
    unit: float
    full_scale: float

    @cached_property
    def errors(self) -> Floats:
        """The largest error between each level and the next."""
        levels = self.levels.astype(np.float64)
        found: Floats = np.maximum(self.boundaries - levels[:-1], levels[1:] - self.boundaries)
        return found

    @cached_property
    def shift(self) -> int | None:
        """The number of trailing bits of float32 that :attr:`cells` ignores: the largest number for
        which a cell contains at most one threshold. None if :attr:`cells` would need more than
        :data:`MOST_CELLS` entries.
        """
        words = self.thresholds[self.thresholds != 0].view(np.uint32)  # 0 is the end of a cell
        shifts = range(20, 31 - MOST_CELLS.bit_length() + 1, -1)
        alone = (s for s in shifts if len(np.unique(words >> np.uint32(s))) == len(words))
        return next(alone, None)

    @cached_property
    def cells(self) -> NDArray[np.int32]:
        """For each pattern of leading bits, the index of the smallest number with these bits."""
        assert self.shift is not None
        low = np.arange(1 << 32 - self.shift, dtype=np.uint32) << np.uint32(self.shift)
        high = low | np.uint32((1 << self.shift) - 1)
        smallest = np.where(low < 1 << 31, low, high).view(np.float32)
        places = np.searchsorted(self.thresholds, smallest, side="right")
        return np.where(np.isnan(smallest), 0, places).astype(np.int32)

    @property
    def ends(self) -> NDArray[np.float32]:
        """:attr:`thresholds` and a final NaN, which no number reaches."""
        return np.append(self.thresholds, np.float32(np.nan))

    @property
    def absolute(self) -> float:
        """The largest error within ``full_scale`` that ``unit`` does not describe."""
        low, high = np.abs(self.levels[:-1]), np.abs(self.levels[1:])
        inside = np.maximum(low, high) <= self.full_scale
        inside &= self.errors > self.unit * np.minimum(low, high)
        return float(self.errors[inside].max(initial=0.0))


def thresholds_of(boundaries: Floats, upwards: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the smallest float32 above each boundary, or the boundary itself.

    Args:
        boundaries: where rounding changes from one level to the next, float64.
        upwards: whether a number at the boundary rounds up.
    """
    found = boundaries.astype(np.float32)
    above = np.nextafter(found, np.float32(np.inf))
    exact = found.astype(np.float64) == boundaries
    reached = np.where(exact, upwards, found.astype(np.float64) > boundaries)
    return np.where(reached, found, above).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class ListedError(ErrorModel):
    """The error of rounding to a list, whose steps follow no simple rule.

    ``relative`` is the unit roundoff between 1 and the full scale. :meth:`bound` is exact, because
    it looks up the two neighbours.

    Attributes:
        format: the format.
    """

    format: Listed

    def bound(self, x: Tensor, group: Tensor | float = 1.0) -> Tensor:
        """Return the largest error between the neighbours of each value in ``x``, or the value's
        distance from the end of the list."""
        import torch

        grid, device = self.format.grid, x.device
        levels = torch.from_numpy(grid.levels).to(device).double()
        errors = torch.from_numpy(grid.errors).to(device)
        exact = x.detach().double()
        below = torch.searchsorted(levels, exact, right=True) - 1
        distance = (exact - exact.clamp(levels[0], levels[-1])).abs()
        return torch.maximum(errors[below.clamp(0, len(errors) - 1)], distance)


class Listed(NumberFormat):
    """A format that is defined by a list of values, which a subclass provides."""

    not_a_real = True
    """Whether the format has a code for NaN, which infinities get as well. Otherwise infinities
    saturate and a NaN has no code."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """The values and their thresholds."""

    @property
    def error(self) -> ErrorModel:
        """The error model; its bound is exact for each value."""
        magnitudes = np.abs(self.grid.levels)
        return ListedError(
            relative=self.grid.unit,
            absolute=self.grid.absolute,
            smallest=float(magnitudes[magnitudes > 0].min()),
            largest=float(magnitudes.max()),
            format=self,
        )

    @property
    def full_scale(self) -> float:
        """The magnitude to which a scale maps a group's largest magnitude."""
        return self.grid.full_scale

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return the codes of ``x``."""
        import torch

        from lns_ops.formats.list_rounding import index, kept

        x = as_float32(x)
        codes = kept(self, "codes", x)[index(self, x, random)]
        if self.not_a_real:
            return Encoded(torch.where(x.isfinite(), codes, self._lowest))
        if x.device.type == "cpu" and bool(x.isnan().any()):
            raise NonFiniteError(
                f"NaN to encode in {self.name}, which has no code for it; clean the input first"
            )
        return Encoded(codes)

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of codes; Not a Real becomes NaN."""
        from lns_ops.formats.list_rounding import kept

        decoded = kept(self, "decoded", encoded.codes)
        return decoded[encoded.codes.long() - self._lowest]

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded to the format, without computing codes; NaNs stay NaN."""
        import torch

        from lns_ops import cuda
        from lns_ops.formats.list_rounding import index, kept

        x = as_float32(x)
        if random is None and on_gpu(x) and self.grid.shift is not None:
            cells, ends, levels = (kept(self, name, x) for name in ("cells", "ends", "levels"))
            return cuda.quantize_listed(x, cells, ends, levels, self.grid.shift, self.not_a_real)
        found = kept(self, "levels", x)[index(self, x, random)]
        return torch.where(x.isfinite() if self.not_a_real else ~x.isnan(), found, torch.nan)

    @property
    def _lowest(self) -> int:
        """The smallest code: Not a Real in two's complement, or 0."""
        return -(len(self.grid.decoded) // 2) if self.not_a_real else 0


@dataclass(frozen=True)
class Table(Listed):
    """Any list of values, read from a file: ``table(path.npy)``.

    It rounds to the nearest value, ties to the one with the even index. Values beyond the ends,
    including infinities, saturate. A code is an index. Values are converted to float32.

    >>> import numpy, tempfile, torch
    >>> with tempfile.NamedTemporaryFile(suffix=".npy") as file:
    ...     numpy.save(file.name, numpy.float32([-1, -0.25, 0, 0.5, 2]))
    ...     Table.read(file.name).quantize(torch.tensor([0.2, 0.25, 1.25, -9]))
    tensor([ 0.,  0.,  2., -1.])

    Attributes:
        path: the file's name as given.
        digest: SHA-256 of the values. Equal formats have the same values.
    """

    path: str
    digest: str
    _levels: NDArray[np.float32] = field(repr=False, compare=False)

    not_a_real = False

    @classmethod
    def read(cls, path: str) -> Table:
        """Read a list; read it again if the file has changed.

        Raises:
            ValueError: no such file, or not 2 to 2^16 finite numbers in increasing order.
        """
        try:
            found = os.stat(path)
        except OSError as error:
            raise ValueError(
                f"table({path}): {error.strerror}; give the path of a file that numpy.save wrote,"
                " absolute if other processes start elsewhere"
            ) from None
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for its writer
            raise ValueError(
                f"table({path}): is not a regular file; give the path of a file that numpy.save"
                " wrote"
            )
        return _read(path, found.st_mtime_ns, found.st_size)

    @property
    def name(self) -> str:
        """The name: ``table(path.npy)``."""
        return f"table({self.path})"

    @property
    def bits(self) -> float:
        """The bits of an index."""
        return (len(self._levels) - 1).bit_length()

    @property
    def storage(self) -> torch.dtype:
        """The narrowest of uint8, int16 and int32 that holds an index."""
        import torch

        count = len(self._levels)
        return torch.uint8 if count <= 1 << 8 else torch.int16 if count <= 1 << 15 else torch.int32

    @cached_property
    def grid(self) -> Grid:
        """The file's values; boundaries are the means of neighbours."""
        levels = self._levels
        low, high = levels[:-1].astype(np.float64), levels[1:].astype(np.float64)
        total = low + high
        # float64's rounding error of the sum (Knuth's two-sum) shows on which side a tie is.
        rest = total - low
        lost = (low - (total - rest)) + (high - rest)
        even = np.arange(1, len(levels)) % 2 == 0
        ends = -float(levels[0]), float(levels[-1])
        return Grid(
            levels=levels,
            boundaries=total / 2,
            thresholds=thresholds_of(total / 2, np.where(lost == 0, even, lost < 0)),
            codes=np.arange(len(levels)),
            decoded=levels,
            unit=0.0,
            full_scale=min(ends) if min(ends) > 0 else max(map(abs, ends)),
        )


@lru_cache(maxsize=64)
def _read(path: str, changed_ns: int, size: int) -> Table:
    try:
        # memory-mapped, so that no memory is allocated for a list that is too long
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy's header reader raises many types
        raise ValueError(f"table({path}): {error}; write it with numpy.save") from None
    _check(path, array)
    levels = np.array(array, np.float32)  # a copy: the file may change
    return Table(path, hashlib.sha256(levels.tobytes()).hexdigest(), levels)


def _check(path: str, array: Any) -> None:
    """Check that an array is a valid list of values.

    Raises:
        ValueError: with the problem, the rule and the remedy.
    """

    def refuse(what: str, rule: str, remedy: str) -> None:
        raise ValueError(f"table({path}): {what}; {rule}; {remedy}")

    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "fiu":
        kind = f"{array.ndim} dimensions of {array.dtype}" if isinstance(array, np.ndarray) else (
            "several arrays"
        )  # fmt: skip
        refuse(f"has {kind}", "must be one list of real numbers", "save values.ravel()")
    if not 2 <= array.size <= LONGEST:
        refuse(f"has {array.size} values", f"must have 2 to {LONGEST}", "choose fewer or more")
    with np.errstate(over="ignore"):
        levels = array.astype(np.float32)
    if not np.isfinite(levels).all():
        at = int(np.flatnonzero(~np.isfinite(levels))[0])
        refuse(f"value {at} is {array[at]}", "must be finite in float32", "leave it out")
    if (falling := np.flatnonzero(levels[1:] <= levels[:-1])).size:
        at = int(falling[0])
        refuse(
            f"value {at} is {array[at]} and value {at + 1} is {array[at + 1]}",
            "must increase, in float32", "save numpy.unique(values.astype('float32'))",
        )  # fmt: skip
