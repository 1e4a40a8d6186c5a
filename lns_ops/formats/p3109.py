"""Floating point of IEEE P3109: ``binaryKpP``, for example ``binary8p3``.

K is the width in bits. P is the precision: the bits of a significand, including the leading 1. A
value has a sign, ``K - P`` exponent bits with the bias ``2^(K-P-1)``, and ``P - 1`` mantissa bits;
below the smallest exponent numbers are subnormal. The differences to IEEE 754 are:

- there is one zero; the code of the negative zero is the only NaN (0x80 with 8 bits);
- the largest exponent field has numbers. Only the largest code of each sign is an infinity (0x7F
  and 0xFF with 8 bits), in ``binary8p3`` and its synonym ``binary8p3se``. In the *finite* format
  ``binary8p3sf`` it is a number, too;
- the bias is larger by 1, so numbers are half as large: ``binary8p3`` ends at 49152, where
  ``float(5,2)`` ends at 57344.

Rounding is to nearest, ties to the even code, and saturates (the standard's ``SatFinite``): larger
numbers and infinities become the largest number. With P = 1 all numbers are powers of two, and ties
go to the even exponent field.

Source: IEEE SA P3109 Working Group, "Interim Report on Binary Floating-point Formats for Machine
Learning", version 3.1 (github.com/P3109/Public). Limits: no unsigned formats; at most 7 exponent
bits, so that float32 represents all values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lns_ops.formats.base import Encoded, as_float32
from lns_ops.formats.sized_float import SizedFloat

if TYPE_CHECKING:
    from torch import Tensor

WIDTHS = (3, 16)
MOST_EXPONENT_BITS = 7
_MANTISSA, _BIAS = 23, 127
_NAME = re.compile(r"binary(\d+)p(\d+)(?:([su])([ef]))?")


@dataclass(frozen=True, kw_only=True)
class P3109(SizedFloat):
    """A signed format of IEEE P3109.

    >>> import torch
    >>> P3109.of(8, 3).quantize(torch.tensor([0.3, -1e-9, 1e9]))
    tensor([3.1250e-01, 0.0000e+00, 4.9152e+04])

    Create one with :meth:`of` from its widths, or with :meth:`named` from its name.

    Attributes:
        extended: whether it has infinities.
    """

    extended: bool = True

    @classmethod
    def of(  # type: ignore[override]
        cls, width: int, precision: int, extended: bool = True
    ) -> P3109:
        """Return the format with these widths.

        Raises:
            ValueError: a width is out of range.
        """
        label = f"binary{width}p{precision}" + ("" if extended else "sf")
        if not WIDTHS[0] <= width <= WIDTHS[1]:
            raise ValueError(
                f"{label}: width={width} must be from {WIDTHS[0]} to {WIDTHS[1]}; use for example"
                " binary8p3"
            )
        if not 1 <= precision < width:
            raise ValueError(
                f"{label}: precision={precision} must be from 1 to {width - 1}, which leaves a bit"
                f" of exponent; use for example binary{width}p{(width + 1) // 2}"
            )
        if width - precision > MOST_EXPONENT_BITS:
            raise ValueError(
                f"{label}: {width - precision} bits of exponent must be at most"
                f" {MOST_EXPONENT_BITS}, because float32 has no more; use for example"
                f" binary{width}p{width - MOST_EXPONENT_BITS}"
            )
        mantissa_bits, largest_code = precision - 1, (1 << width - 1) - 1 - extended
        fraction = largest_code % (1 << mantissa_bits) / (1 << mantissa_bits)
        exponent = (largest_code >> mantissa_bits) - (1 << width - precision - 1)
        return cls(
            label=label,
            exponent_bits=width - precision,
            mantissa_bits=mantissa_bits,
            largest=(1 + fraction) * 2.0**exponent,
            saturates=True,
            extended=extended,
        )

    @classmethod
    def named(cls, name: str) -> P3109 | None:
        """Return the format with this name, or None if it is not a P3109 name.

        Raises:
            ValueError: a width is out of range, or the format is unsigned.
        """
        if (match := _NAME.fullmatch(name)) is None:
            return None
        width, precision, sign, domain = match.groups()
        if sign == "u":
            raise ValueError(
                f"{name}: an unsigned format has no negative numbers, which weights and gradients"
                f" need; use binary{width}p{precision}"
            )
        return cls.of(int(width), int(precision), domain != "f")

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 1 - (1 << self.exponent_bits - 1)

    @property
    def kernel(self) -> None:
        """None, because the kernels for scaled formats would keep the sign of zero."""

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return the codes of ``x``."""
        import torch

        values = self._on_grid(as_float32(x), random)
        fields = self._fields(values)
        sign = (values < 0).to(torch.int32) << int(self.bits) - 1
        codes = torch.where(values.isnan(), 1 << int(self.bits) - 1, fields | sign)
        return Encoded(codes.to(self.storage))

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of codes, float32."""
        import torch

        negative = 1 << int(self.bits) - 1
        codes = encoded.codes.to(torch.int32) & 2 * negative - 1
        magnitude = codes & negative - 1
        values = self._numbers(magnitude)
        if self.extended:
            values = torch.where(magnitude == negative - 1, torch.inf, values)
        values = torch.where(codes > negative, -values, values)
        return torch.where(codes == negative, torch.nan, values)

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded to the format, always as a new tensor; NaNs stay NaN.

        Rounding to nearest uses the kernel for 8-bit floats if the format has a mantissa.
        """
        import torch

        x = as_float32(x)
        found = None
        if random is None and self.mantissa_bits:
            found = self._by_kernel(x, super().kernel)
        if found is None:
            return self._on_grid(x, random)
        return torch.where(found == 0, 0.0, found)

    def _on_grid(self, x: Tensor, random: Tensor | None) -> Tensor:
        """Round float32 values with torch operations."""
        import torch

        from lns_ops.formats.bit_views import bit_view

        found = super()._on_grid(x, random)
        if random is None and not self.mantissa_bits:
            step = self.step(x)
            field = (bit_view(step, torch.int32) >> _MANTISSA) - _BIAS - self.min_exponent + 1
            down = x.isfinite() & (x.abs() == 1.5 * step) & (field % 2 == 0)
            found = torch.where(down, step.copysign(x), found)
        return torch.where(found == 0, 0.0, found)
