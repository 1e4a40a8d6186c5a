"""Binary floating point with fields of any width: ``float(e,m)``.

A value has a sign, ``e`` exponent bits with the bias ``2^(e-1) - 1`` and ``m`` mantissa bits. Below
the smallest exponent numbers are subnormal, and rounding is to nearest with ties to even. So these
are IEEE 754's binary formats with other widths (IEEE Std 754-2019, section 3.4). There are three
variants, which differ in the largest exponent field and in numbers beyond the largest:

- ``float(e,m)``: the field has infinities and NaNs, as in IEEE 754, but numbers saturate at the
  largest, as in :data:`lns_ops.formats.float8_e5m2`, which equals ``float(5,2)``.
- ``float(e,m,inf)``: numbers overflow to infinity. ``float(5,10,inf)`` is ``float16``,
  ``float(8,7,inf)`` is ``bfloat16``.
- ``float(e,m,finite)``: the field is one more octave of numbers. Infinities and NaNs do not exist,
  and numbers saturate. The elements of microscaling formats are ``float(2,1,finite)``,
  ``float(3,2,finite)`` and ``float(2,3,finite)`` (Open Compute Project, "OCP Microscaling Formats
  (MX) Specification v1.0", 2023).

``float8_e4m3fn`` is a fourth variant: the largest field has numbers and one NaN. It reaches 448,
where ``float(4,3)`` ends at 240 and ``float(4,3,finite)`` at 480. Up to 240 all three are the same.

Codes are the fields, in an integer of at least ``1 + e + m`` bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lns_ops.formats.base import Encoded, as_float32
from lns_ops.formats.floating_point import FloatFormat
from lns_ops.spec.format import NonFiniteError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EXPONENT_BITS, MANTISSA_BITS = (2, 8), (1, 23)
SATURATE, INFINITE, FINITE = "saturate", "inf", "finite"
_MANTISSA, _BIAS = 23, 127
_KERNEL_MANTISSA = 21
"""Maximum number of mantissa bits that the kernels support: they add 1.5 x 2^23 steps, and there
must be room for two octaves of mantissas."""


@dataclass(frozen=True, kw_only=True)
class SizedFloat(FloatFormat):
    """A floating-point format with any widths.

    >>> import torch
    >>> SizedFloat.of(3, 4).quantize(torch.tensor([0.3, 0.01, 99.0]))
    tensor([ 0.2969,  0.0156, 15.5000])

    Create one from its widths with :meth:`of`.

    Attributes:
        overflow: ``saturate``, ``inf`` or ``finite``; see :mod:`lns_ops.formats.sized_float`.
    """

    overflow: str = SATURATE

    @classmethod
    def of(cls, exponent_bits: int, mantissa_bits: int, overflow: str = SATURATE) -> SizedFloat:
        """Return the format with these widths.

        Raises:
            ValueError: a width is out of range.
        """
        end = "" if overflow == SATURATE else f",{overflow}"
        label = f"float({exponent_bits},{mantissa_bits}{end})"
        for what, bits, (low, high), example in (
            ("exponent_bits", exponent_bits, EXPONENT_BITS, (4, mantissa_bits or 3)),
            ("mantissa_bits", mantissa_bits, MANTISSA_BITS, (exponent_bits, 3)),
        ):
            if not low <= bits <= high:
                raise ValueError(
                    f"{label}: {what}={bits} must be from {low} to {high}, because float32 has no"
                    f" more; use for example float({example[0]},{example[1]})"
                )
        if overflow == FINITE and exponent_bits == EXPONENT_BITS[1]:
            raise ValueError(
                f"{label}: its largest octave must be within float32's range, which ends before it"
                f" with 8 exponent bits; use float({exponent_bits},{mantissa_bits}) or"
                f" float(7,{mantissa_bits},finite)"
            )
        octaves = (1 << exponent_bits - 1) - (overflow != FINITE)
        return cls(
            label=label,
            exponent_bits=exponent_bits,
            mantissa_bits=mantissa_bits,
            largest=(2 - 2.0**-mantissa_bits) * 2.0**octaves,
            saturates=overflow != INFINITE,
            overflow=overflow,
        )

    @property
    def storage(self) -> torch.dtype:
        """The narrowest of uint8, int16 and int32 that holds the fields."""
        import torch

        return torch.uint8 if self.bits <= 8 else torch.int16 if self.bits <= 16 else torch.int32

    @property
    def kernel(self) -> tuple[int, int] | None:
        """The number of mantissa bits and the smallest normal exponent; None for 8 exponent bits,
        and for more mantissa bits than kernels support."""
        fits = self.exponent_bits < 8 and self.mantissa_bits <= _KERNEL_MANTISSA
        return (self.mantissa_bits, self.min_exponent) if fits else None

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return the fields of ``x``."""
        import torch

        from lns_ops.formats.bit_views import bit_view

        values = self._on_grid(as_float32(x), random)
        if self.overflow == FINITE and values.device.type == "cpu" and bool(values.isnan().any()):
            raise NonFiniteError(
                f"NaN to encode in {self.name}, which has no code for it; clean the input first"
            )
        m, top = self.mantissa_bits, (1 << self.exponent_bits) - 1
        fields = self._fields(values)
        fields = torch.where(values.isinf(), top << m, fields)
        fields = torch.where(values.isnan(), top << m | 1 << m - 1, fields)
        sign = (bit_view(values, torch.int32) >> 31 & 1) << self.exponent_bits + m
        return Encoded((fields | sign).to(self.storage))

    def _fields(self, values: Tensor) -> Tensor:
        """Return exponent and mantissa fields of finite rounded values, int32."""
        import torch

        from lns_ops.formats.bit_views import bit_view

        m = self.mantissa_bits
        magnitude = bit_view(values, torch.int32) & 0x7FFFFFFF
        if self.exponent_bits == 8:
            return magnitude >> _MANTISSA - m
        steps = (values.abs() * 2.0 ** (m - self.min_exponent)).nan_to_num(0.0, 0.0)
        normal = (magnitude >> _MANTISSA - m) - (_BIAS - 1 + self.min_exponent << m)
        small = magnitude < self.min_exponent + _BIAS << _MANTISSA
        return torch.where(small, steps.clamp(max=1 << m).to(torch.int32), normal)

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of fields, float32."""
        import torch

        from lns_ops.formats.bit_views import bit_view

        e, m = self.exponent_bits, self.mantissa_bits
        codes = encoded.codes.to(torch.int32)
        field, mantissa = codes >> m & (1 << e) - 1, codes & (1 << m) - 1
        sign = (codes >> e + m & 1) << 31
        word = bit_view(self._numbers(codes & (1 << e + m) - 1), torch.int32)
        if self.overflow != FINITE:
            special = 0x7F800000 | mantissa << _MANTISSA - m
            word = torch.where(field == (1 << e) - 1, special, word)
        return bit_view(word | sign, torch.float32)

    def _numbers(self, fields: Tensor) -> Tensor:
        """Return the magnitudes of exponent and mantissa fields, float32."""
        import torch

        from lns_ops.formats.bit_views import bit_view

        m = self.mantissa_bits
        if self.exponent_bits == 8:
            return bit_view(fields << _MANTISSA - m, torch.float32)
        field, mantissa = fields >> m, fields & (1 << m) - 1
        exponent = field + (self.min_exponent + _BIAS - 1)
        normal = bit_view(exponent << _MANTISSA | mantissa << _MANTISSA - m, torch.float32)
        return torch.where(field == 0, mantissa.float() * 2.0 ** (self.min_exponent - m), normal)

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded to the format, always as a new tensor; NaNs stay NaN.

        Saturating rounding to nearest uses the kernel of 8-bit floats if :attr:`kernel` is set.
        """
        x = as_float32(x)
        if random is None and self.saturates and (found := self._by_kernel(x)) is not None:
            return found
        return self._on_grid(x, random)

    def _on_grid(self, x: Tensor, random: Tensor | None) -> Tensor:
        """Round float32 values with torch operations."""
        import torch

        if random is not None:
            found = self._stochastic(x, random)
        elif self.exponent_bits == 8:
            found = self._nearest(x) if self.mantissa_bits < _MANTISSA else x.clone()
        else:
            step = self.step(x)
            found = torch.where(x.isfinite(), (x / step).round() * step, x)
        if self.saturates:
            return found.clamp(-self.largest, self.largest)
        return torch.where(found.abs() > self.largest, found.sign() * torch.inf, found)
