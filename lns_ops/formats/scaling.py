"""Scales that let a group of values use the whole range of a narrow format.

Granularity ``tensor``: one scale for all values. ``channel``: one for each index of the first
dimension, which is an output channel of a weight and an example of activations and gradients
(tensors of fewer than two dimensions have one scale). A matrix product can take a scale out of its
sum only if it is constant along it; with ``channel`` that holds for the forward product and not for
both backward ones, which a device would have to encode anew. ``block``: one for each 32 values
along the last dimension, as in microscaling formats (Open Compute Project, "OCP Microscaling
Formats (MX) Specification v1.0", 2023).

:class:`Scaled` gives any format a scale that is a power of two, the largest with which nothing
saturates: for LNS an offset of the logarithm, for floating point of the exponent. So decoding is
exact and the scale itself costs no accuracy. Posits and takums are least precise at their largest
magnitude; of these the group's largest is taken to where they are as precise as at 1
(:attr:`~lns_ops.formats.NumberFormat.full_scale`).
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
"""Values of a block."""
SCALE_BITS = 8
"""Bits of a block's power of two."""
_LONG_ROW = 1 << 16
"""Values of a row, which is one thread's in the kernel, above which torch's threads share them
better where there are fewer rows than threads."""


def check_granularity(granularity: str, known: tuple[str, ...] = GRANULARITIES) -> None:
    """Refuse what is not one of ``known``.

    Raises:
        ValueError: with those there are.
    """
    if granularity not in known:
        raise ValueError(
            f"granularity={granularity!r}: must be one of {', '.join(known)}; use for"
            " example int8/channel"
        )


def group_largest(x: Tensor, granularity: str, block: int = BLOCK_SIZE) -> Tensor:
    """Return the largest magnitude of each group that shares a scale; :func:`spread` repeats it.

    It is 0 for an empty tensor. ``block`` is the number of values of a block.
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
    """Return what is one a group so that it broadcasts over a tensor of ``shape``."""
    if granularity != BLOCK or not scale.dim():
        return scale
    repeated = scale.unsqueeze(-1).expand(*scale.shape, block).flatten(-2)
    return repeated[..., : shape[-1]]


def group_lengths(x: Tensor, granularity: str, block: int = BLOCK_SIZE) -> tuple[int, int]:
    """Return the numbers of values of a row, and of a group in it that shares a scale."""
    if granularity == BLOCK and x.dim():
        return x.shape[-1], block
    one = granularity == TENSOR or x.dim() < 2
    width = x.numel() if one else math.prod(x.shape[1:])
    return width, width


def _power(exponent: Tensor) -> Tensor:
    """Return ``2^exponent`` by its bits, for exponents in -126 .. 127."""
    import torch

    from lns_ops.formats.bit_views import bit_view

    return bit_view(exponent.to(torch.int32) + 127 << 23, torch.float32)


@dataclass(frozen=True)
class Scaled(NumberFormat):
    """A format with a power of two a tensor, channel or block: ``value = base value x scale``.

    Args:
        base: an unscaled format whose range is narrower than float32's.
        granularity: ``tensor``, ``channel`` or ``block``.
        block: number of values of a block.

    Raises:
        ValueError: a format that has a scale or needs none.
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
                f"{self.base}/{self.granularity}: {self.base} has float32's range, a scale would"
                f" change nothing; use {self.base}"
            )

    @property
    def name(self) -> str:
        """The name: ``lns8/channel``, ``float8_e4m3fn/tensor``."""
        return f"{self.base}/{self.granularity}"

    @property
    def bits(self) -> float:
        """The width of ``base``, and a value's share of its block's scale."""
        return self.base.bits + (SCALE_BITS / self.block if self.granularity == BLOCK else 0)

    @property
    def storage(self) -> torch.dtype:
        """The storage of ``base``."""
        return self.base.storage

    @property
    def error(self) -> ErrorModel:
        """The error model of ``base``, scaled to the group's largest magnitude.

        ``base``'s full scale is between one and two times the group's.
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
        """Return ``base``'s values times the scale."""
        assert encoded.scale is not None
        values = self.base.decode(Encoded(encoded.codes))
        return values.mul_(self._spread(encoded.scale, values))

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` on the grid of ``base`` times the scale.

        Rounding to nearest is one kernel on a CPU, and on a GPU with CuPy, for those of ``base``
        that have one.
        """
        x = as_float32(x)
        if random is None and (found := self._by_kernel(x)) is not None:
            return found
        up, down = self._scales(x)
        return self.base.quantize(x * self._spread(up, x), random).mul_(self._spread(down, x))

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Return ``x`` rounded by a kernel, with the same bits; None where there is none, it would
        be slower, torch traces, or, on a CPU, a value is not finite."""
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
        """The magnitude that the largest of a group must not exceed."""
        return self.base.full_scale

    def _spread(self, scale: Tensor, x: Tensor) -> Tensor:
        return spread(scale, x.shape, self.granularity, self.block)

    def _scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the power of two that takes a group into ``base``'s range, and its inverse.

        The group's largest magnitude comes to lie above half of ``base``'s full scale, and at most
        at it.
        """
        import torch

        limit, limit_exponent = math.frexp(self._limit)
        fraction, exponent = torch.frexp(group_largest(x, self.granularity, self.block))
        shift = limit_exponent - exponent - (fraction > limit).to(exponent.dtype)
        shift = torch.where(fraction > 0, shift, 0).clamp(-126, 126)
        return _power(shift), _power(-shift)
