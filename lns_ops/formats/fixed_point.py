"""Formats with constant steps: fixed point with a fixed step, and integers with a scale.

The scale of integers is computed at run time. Both kinds round to nearest with ties to even,
saturate, and have no code for NaN.

*Kahan summation in fixed point.* Sums of fixed-point numbers are exact, so a compensation of the
same format would always be zero. Updates are lost earlier, because an update below half a step
becomes zero. :attr:`FixedPoint.compensation` is therefore a second word of the same width that
continues the first one: weight and compensation together are a fixed-point number of nearly twice
the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lns_ops.formats.base import Encoded, ErrorModel, NumberFormat, as_float32, on_gpu, randomly_up
from lns_ops.formats.scaling import CHANNEL, TENSOR, check_granularity, group_largest, group_lengths
from lns_ops.spec.format import NonFiniteError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FIXED_BITS = (2, 24)
INTEGER_BITS = (2, 12)


def integer_dtype(bits: int) -> torch.dtype:
    """Return the narrowest signed integer dtype with at least ``bits`` bits, up to int32."""
    import torch

    return torch.int8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32


def _to_codes(steps: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert whole numbers to integers; raise if one is NaN."""
    if steps.device.type == "cpu" and bool(steps.isnan().any()):
        raise NonFiniteError(
            f"NaN to encode in {name}, which has no code for it; clean the input first"
        )
    return steps.to(dtype)


class _WholeNumbers(NumberFormat):
    """Formats whose codes are whole numbers of ``width`` bits."""

    width: int

    @property
    def bits(self) -> float:
        """The width."""
        return self.width

    @property
    def storage(self) -> torch.dtype:
        """The narrowest integer dtype with at least ``width`` bits."""
        return integer_dtype(self.width)


@dataclass(frozen=True)
class FixedPoint(_WholeNumbers):
    """Two's complement fixed point ``Qm.n``: multiples of 2^-n in [-2^m, 2^m - 2^-n].

    ``n = fraction_bits`` and ``m = bits - 1 - n``.

    >>> import torch
    >>> FixedPoint(8, 4).quantize(torch.tensor([0.3, -1.26, 100.0]))
    tensor([ 0.3125, -1.2500,  7.9375])

    Args:
        width: bits including the sign, 2 to 24 (so that float32 represents all values exactly).
        fraction_bits: bits after the binary point, -126 + width to 126; 0 for integers, more than
            ``width - 1`` for fractions only.

    Raises:
        ValueError: ``width`` or ``fraction_bits`` is out of range.
    """

    width: int
    fraction_bits: int

    def __post_init__(self) -> None:
        low, high = FIXED_BITS
        if not low <= self.width <= high:
            raise ValueError(
                f"bits={self.width}: fixed point has {low} to {high} bits, so that float32"
                " represents it exactly; use for example fixed(16,8)"
            )
        if not self.width - 126 <= self.fraction_bits <= 126:
            raise ValueError(
                f"fraction_bits={self.fraction_bits}: with bits={self.width} must be from"
                f" {self.width - 126} to 126, float32's range; use for example"
                f" fixed({self.width},{self.width // 2})"
            )

    @property
    def name(self) -> str:
        """The name ``fixed(bits,fraction_bits)``."""
        return f"fixed({self.width},{self.fraction_bits})"

    @property
    def step(self) -> float:
        """The distance between neighbouring values: ``2^-fraction_bits``."""
        return 2.0**-self.fraction_bits

    @property
    def error(self) -> ErrorModel:
        """The error model: half a step for all values."""
        largest = ((1 << self.width - 1) - 1) * self.step
        return ErrorModel(relative=0.0, absolute=self.step / 2, smallest=self.step, largest=largest)

    @property
    def compensation(self) -> NumberFormat:
        """The word that continues this one, with a range from minus a step to a step.

        The docstring of :mod:`lns_ops.formats.fixed_point` gives the reason.
        """
        return FixedPoint(self.width, min(self.fraction_bits + self.width - 1, 126))

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return ``x`` in whole steps."""
        return Encoded(_to_codes(self._steps(x, random), self.storage, self.name))

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of codes: code times step."""
        return encoded.codes.float() * self.step

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded to the format, without computing codes."""
        return self._steps(x, random).mul_(self.step)

    def _steps(self, x: Tensor, random: Tensor | None) -> Tensor:
        steps = as_float32(x) * (1 / self.step)
        steps = steps.round_() if random is None else randomly_up(steps, random)
        return steps.clamp_(-(1 << self.width - 1), (1 << self.width - 1) - 1)


@dataclass(frozen=True)
class Integer(_WholeNumbers):
    """Symmetric integers with a scale: ``value = code scale``.

    Codes are ``-c .. c`` with ``c = 2^(bits - 1) - 1``. The scale is the largest magnitude of a
    group divided by c, rounded to 24 - (bits - 1) significant bits. So ``code scale`` is exact in
    float32, and encoding a decoded tensor gives the same bits.

    >>> import torch
    >>> Integer(8).quantize(torch.tensor([1.0, 0.3, -0.004]))
    tensor([ 1.0000,  0.2992, -0.0079])

    Args:
        width: bits, 2 to 12.
        granularity: ``tensor`` or ``channel``, see :mod:`lns_ops.formats.scaling`.

    Raises:
        ValueError: ``width`` is out of range, or an unknown granularity.
    """

    width: int
    granularity: str = TENSOR

    def __post_init__(self) -> None:
        low, high = INTEGER_BITS
        if not low <= self.width <= high:
            raise ValueError(
                f"int{self.width}: scaled integers have {low} to {high} bits; use int8, or"
                f" fixed({max(self.width, 2)},8) for a fixed step"
            )
        check_granularity(self.granularity, (TENSOR, CHANNEL))

    @property
    def name(self) -> str:
        """The name: ``int8`` with one scale per tensor, ``int8/channel`` with one per channel."""
        return f"int{self.width}" + ("" if self.granularity == TENSOR else f"/{self.granularity}")

    @property
    def largest_code(self) -> int:
        """The largest code: ``2^(bits - 1) - 1``."""
        return (1 << self.width - 1) - 1

    @property
    def error(self) -> ErrorModel:
        """The error model: half a step, in units of the group's largest magnitude."""
        step = 1 / self.largest_code
        kept = 1 + 2.0 ** -(23 - self.width)  # the scale is rounded, too
        return ErrorModel(
            relative=0.0, absolute=step / 2 * kept, smallest=step, largest=1.0, scaled=True
        )

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return ``x`` in whole steps of the scale, and the scale."""
        steps, scale = self._steps(x, random)
        return Encoded(_to_codes(steps, self.storage, self.name), scale)

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of codes: code times scale."""
        assert encoded.scale is not None
        return encoded.codes.float() * encoded.scale

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded to the format, without computing codes; NaNs stay NaN.

        On a GPU with CuPy, rounding to nearest is one kernel.
        """
        x = as_float32(x)
        if random is None and on_gpu(x):
            from lns_ops import cuda

            return cuda.quantize_integers(x, *group_lengths(x, self.granularity), self.width)
        steps, scale = self._steps(x, random)
        return steps.mul_(scale)

    def _steps(self, x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
        x = as_float32(x)
        scale = self._scale(x)
        steps = x / scale
        steps = steps.round_() if random is None else randomly_up(steps, random)
        return steps.clamp_(-self.largest_code, self.largest_code), scale

    def _scale(self, x: Tensor) -> Tensor:
        import torch

        from lns_ops.formats.bit_views import bit_view

        largest = group_largest(x, self.granularity)
        # The divisor is a tensor: GPUs replace division by a constant by multiplication by its
        # reciprocal, and the last bit may differ.
        ratio = largest / torch.full_like(largest, self.largest_code)
        drop = self.width - 1
        word = bit_view(ratio, torch.int32) + (1 << drop - 1) & -(1 << drop)
        usable = (ratio >= torch.finfo(torch.float32).tiny) & ratio.isfinite()
        return torch.where(usable, bit_view(word, torch.float32), 1.0)
