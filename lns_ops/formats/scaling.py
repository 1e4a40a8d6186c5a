"""Scales that let a group of values use the whole range of a narrow format.

There are three granularities:

- ``tensor``: one scale for all values.
- ``channel``: one scale for each index of the first dimension, which is an output channel of a
  weight and an example of activations and gradients. Tensors with fewer than two dimensions have
  one scale. A matrix product can factor out a scale only if it is constant along the sum. With
  ``channel`` this holds for the forward product but not for both backward products, for which a
  device would have to encode again.
- ``block``: one scale for each 32 values along the last dimension, as in microscaling formats (Open
  Compute Project, "OCP Microscaling Formats (MX) Specification v1.0", 2023).

:class:`Scaled` adds to any format a scale that is a power of two: the smallest one that avoids
saturation. It is an offset of the logarithm in LNS, and of the exponent in floating point. So
decoding is exact and the scale itself costs no accuracy. Posits and takums are least precise at
their largest magnitude, so their scale maps the group's largest magnitude to a range in which they
are as precise as at 1 (:attr:`~lns_ops.formats.NumberFormat.full_scale`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lns_ops.formats.base import Encoded, ErrorModel, NumberFormat, as_float32, eager_values, on_gpu

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TENSOR, CHANNEL, BLOCK = "tensor", "channel", "block"
GRANULARITIES = (TENSOR, CHANNEL, BLOCK)
BLOCK_SIZE = 32
"""Number of values of a block."""
SCALE_BITS = 8
"""Width of a block's scale exponent, in bits."""
_LONG_ROW = 1 << 16
"""Maximum length of a row for the kernel, if there are fewer rows than threads. The kernel uses one
thread a row; torch's operations share longer rows between threads and are faster."""


def check_granularity(granularity: str, known: tuple[str, ...] = GRANULARITIES) -> None:
    """Check that a granularity is one of ``known``.

    Raises:
        ValueError: it is not; the message lists the known ones.
    """
    if granularity not in known:
        raise ValueError(
            f"granularity={granularity!r}: must be one of {', '.join(known)}; use for"
            " example int8/channel"
        )


def group_largest(x: Tensor, granularity: str, block: int = BLOCK_SIZE) -> Tensor:
    """Return the largest magnitude of each group; :func:`spread` broadcasts it to the values.

    For an empty tensor it is 0. ``block`` is the number of values of a block.
    """
    from torch.nn.functional import pad

    if x.numel() == 0:
        return x.new_zeros(())
    if granularity == BLOCK and x.dim():
        padded = pad(x.abs(), (0, -x.shape[-1] % block))
        blocks: Tensor = padded.unflatten(-1, (-1, block))
        return blocks.amax(-1)
    if granularity != CHANNEL or x.dim() < 2:
        return x.abs().amax()
    return x.abs().amax(dim=tuple(range(1, x.dim())), keepdim=True)


def spread(
    scale: Tensor, shape: tuple[int, ...], granularity: str, block: int = BLOCK_SIZE
) -> Tensor:
    """Reshape a tensor with one value a group so that it broadcasts over a tensor of ``shape``."""
    if granularity != BLOCK or not scale.dim():
        return scale
    repeated = scale.unsqueeze(-1).expand(*scale.shape, block).flatten(-2)
    return repeated[..., : shape[-1]]


def group_lengths(x: Tensor, granularity: str, block: int = BLOCK_SIZE) -> tuple[int, int]:
    """Return the length of a row, and of the groups within a row that share a scale."""
    if granularity == BLOCK and x.dim():
        return x.shape[-1], block
    one = granularity == TENSOR or x.dim() < 2
    width = x.numel() if one else math.prod(x.shape[1:])
    return width, width


def _power(exponent: Tensor) -> Tensor:
    """Return ``2^exponent`` computed from its bits, for exponents in -126 .. 127."""
    import torch

    from lns_ops.formats.bit_views import bit_view

    return bit_view(exponent.to(torch.int32) + 127 << 23, torch.float32)


@dataclass(frozen=True)
class Scaled(NumberFormat):
    """A format with a power-of-two scale for each tensor, channel or block: ``base value x scale``.

    >>> import torch
    >>> from lns_ops import formats
    >>> fmt = Scaled(formats.parse("float8_e4m3fn"), "tensor")
    >>> fmt.name, fmt.quantize(torch.tensor([1e6, 1e4]))
    ('float8_e4m3fn/tensor', tensor([983040.,  10240.]))

    Args:
        base: an unscaled format whose range is narrower than float32's.
        granularity: ``tensor``, ``channel`` or ``block``.
        block: number of values of a block.

    Raises:
        ValueError: a format that has its own scale, or has float32's range.
    """

    base: NumberFormat
    granularity: str
    block: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        check_granularity(self.granularity)
        if self.base.error.scaled:
            raise ValueError(
                f"{self.base}/{self.granularity}: {self.base} has a scale of its own; use"
                f" {self.base} as it is"
            )
        if self.base.full_scale > 2.0**100:
            raise ValueError(
                f"{self.base}/{self.granularity}: {self.base} has float32's range, so a scale would"
                f" change nothing; use {self.base}"
            )

    @property
    def name(self) -> str:
        """The name: ``lns8/channel``, ``float8_e4m3fn/tensor``."""
        return f"{self.base}/{self.granularity}"

    @property
    def bits(self) -> float:
        """The width of ``base`` plus a value's share of its block's scale."""
        return self.base.bits + (SCALE_BITS / self.block if self.granularity == BLOCK else 0)

    @property
    def storage(self) -> torch.dtype:
        """The storage of ``base``."""
        return self.base.storage

    @property
    def error(self) -> ErrorModel:
        """The error model of ``base``, in units of the group's largest magnitude.

        ``base``'s full scale is between one and two times the group's largest magnitude.
        """
        base = self.base.error
        half = self.base.full_scale / 2
        return ErrorModel(
            relative=base.relative,
            absolute=base.absolute / half,
            smallest=base.smallest / half,
            largest=1.0,
            scaled=True,
        )

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return the codes of ``base`` and one scale per group."""
        x = as_float32(x)
        up, down = self._scales(x)
        return Encoded(self.base.encode(x * self._spread(up, x), random).codes, down)

    def decode(self, encoded: Encoded) -> Tensor:
        """Return ``base``'s values times their scale."""
        assert encoded.scale is not None
        values = self.base.decode(Encoded(encoded.codes))
        return values.mul_(self._spread(encoded.scale, values))

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded to ``base`` times the scale.

        Rounding to nearest is one kernel on a CPU, and on a GPU with CuPy, if ``base`` has one.
        """
        x = as_float32(x)
        if random is None and (found := self._by_kernel(x)) is not None:
            return found
        up, down = self._scales(x)
        return self.base.quantize(x * self._spread(up, x), random).mul_(self._spread(down, x))

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Return ``x`` rounded by a kernel, with the same bits. Returns None without a kernel, if
        it would be slower, if torch traces, or, on a CPU, if a value is not finite."""
        kind = self.base.kernel
        if kind is None:
            return None
        lengths = group_lengths(x, self.granularity, self.block)
        if on_gpu(x):
            from lns_ops import cuda

            if isinstance(kind, tuple):
                return cuda.quantize_floats(
                    x, *lengths, *kind, self._limit, saturates=not self.base.overflows
                )
            return cuda.quantize_logarithms(x, *lengths, kind, self._limit)
        if (values := eager_values(x)) is None:
            return None
        import torch

        from lns_ops import cpu

        width, length = lengths
        if width > _LONG_ROW and x.numel() // width < cpu.get_num_threads():
            return None
        found = cpu.quantize_scaled(values, width, length, kind, self._limit)
        return None if found is None else torch.from_numpy(found)

    @cached_property
    def _limit(self) -> float:
        """The upper bound for the scaled largest magnitude of a group."""
        return self.base.full_scale

    def _spread(self, scale: Tensor, x: Tensor) -> Tensor:
        return spread(scale, x.shape, self.granularity, self.block)

    def _scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the power of two that maps a group into ``base``'s range, and its inverse.

        The group's largest magnitude is mapped to between half of ``base``'s full scale (exclusive)
        and the full scale (inclusive).
        """
        import torch

        limit, limit_exponent = math.frexp(self._limit)
        fraction, exponent = torch.frexp(group_largest(x, self.granularity, self.block))
        shift = limit_exponent - exponent - (fraction > limit).to(exponent.dtype)
        shift = torch.where(fraction > 0, shift, 0).clamp(-126, 126)
        return _power(shift), _power(-shift)
