"""Binary floating point: a sign, an exponent field, a mantissa field.

A value is ``+-(1 + m / 2^M) 2^e`` for exponents from ``min_exponent``; below it the step is
constant (subnormal numbers). Rounding is to nearest, ties to even, by torch's own conversion if
torch has the dtype. ``float16`` and wider formats overflow to infinity, as IEEE 754 says. The two
8-bit formats saturate, as in training recipes for them (torch's bare conversion gives NaN or
infinity).

``tf32`` is the part of a float32 operand that NVIDIA's tensor cores use (8 exponent and 10 mantissa
bits). It is 19 bits wide and stored in 32. Source of the 8-bit formats: P. Micikevicius et al.,
"FP8 formats for deep learning", 2022 (arXiv:2209.05433).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lns_ops.formats.base import (
    Encoded,
    ErrorModel,
    NumberFormat,
    as_float32,
    eager_values,
    on_gpu,
    randomly_up,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MANTISSA = 23
_BIAS = 127


@dataclass(frozen=True, kw_only=True)
class FloatFormat(NumberFormat):
    """A floating-point format.

    Attributes:
        label: name; the dtype's name if torch has the dtype.
        exponent_bits, mantissa_bits: widths of the fields.
        largest: largest finite magnitude.
        saturates: whether larger values saturate instead of becoming infinite.
    """

    label: str
    exponent_bits: int
    mantissa_bits: int
    largest: float
    saturates: bool = False

    @property
    def name(self) -> str:
        """The name; torch's name of the dtype if there is one."""
        return self.label

    @property
    def bits(self) -> float:
        """The width: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype, whose conversion rounds to nearest; None if torch has no such dtype."""
        import torch

        return getattr(torch, self.label, None)

    @property
    def storage(self) -> torch.dtype:
        """The dtype itself; float32 for tf32."""
        import torch

        return self.dtype or torch.float32

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def error(self) -> ErrorModel:
        """The error model: half a unit in the last mantissa bit."""
        step = 2.0 ** (self.min_exponent - self.mantissa_bits)
        return ErrorModel(
            relative=2.0 ** -(self.mantissa_bits + 1),
            absolute=step / 2,
            smallest=step,
            largest=self.largest,
        )

    @property
    def kernel(self) -> tuple[int, int] | None:
        """The number of mantissa bits and the smallest normal exponent."""
        return self.mantissa_bits, self.min_exponent

    @property
    def overflows(self) -> bool:
        """Whether gradients need loss scaling: only in float16."""
        return self.exponent_bits < 8 and not self.saturates

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return ``x`` in torch's dtype, NaN and infinities included."""
        x = as_float32(x)
        if random is not None:
            x = self._stochastic(x, random)
        elif self.dtype is None:
            x = self._nearest(x)
        if self.saturates:
            x = x.clamp(-self.largest, self.largest)
        return Encoded(x.to(self.storage))

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the codes as float32."""
        return encoded.codes.float()

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded to the format, always as a new tensor.

        Rounding to the nearest 8-bit float uses a kernel on a CPU, and on a GPU with CuPy. It gives
        the bits of torch's conversion, which takes 8 times as long for 100,000 values on a CPU.
        """
        import torch

        x = as_float32(x)
        if random is None and self.saturates and (found := self._by_kernel(x)) is not None:
            return found
        if torch.compiler.is_compiling() and self.dtype in (torch.float16, torch.bfloat16):
            return self._compiled(x if random is None else self._stochastic(x, random))
        out = super().quantize(x, random)
        return out.clone() if self.dtype == torch.float32 else out

    def _by_kernel(self, x: Tensor, kind: tuple[int, int] | None = None) -> Tensor | None:
        """Return ``x`` rounded by a kernel (of ``kind``, by default :attr:`kernel`). Returns None
        without a kernel, if torch traces, or, on a CPU, if a value is not finite."""
        if (kind := kind or self.kernel) is None:
            return None
        if on_gpu(x):
            from lns_ops import cuda

            return cuda.quantize_floats(x, x.numel(), 0, *kind, self.largest, saturates=True)
        if (values := eager_values(x)) is None:
            return None
        import torch

        from lns_ops import cpu

        found = cpu.quantize_float(values, *kind, self.largest)
        return None if found is None else torch.from_numpy(found)

    def _nearest(self, x: Tensor) -> Tensor:
        """Round to nearest, ties to even, by dropping mantissa bits.

        Used for formats with float32's range and no torch dtype, and in compiled code for bfloat16.
        """
        import torch

        from lns_ops.formats.bit_views import bit_view

        drop, word = _MANTISSA - self.mantissa_bits, bit_view(x, torch.int32)
        rounded = word + ((1 << drop - 1) - 1) + (word >> drop & 1) & -(1 << drop)
        return torch.where(x.isfinite(), bit_view(rounded, torch.float32), x)

    def _compiled(self, x: Tensor) -> Tensor:
        """Round to nearest, ties to even, with the bits of torch's conversion to 16 bits and back.

        If compiled code computes in float32 before and after that pair of conversions, the compiler
        removes the pair (torch 2.13), and the value would not be rounded.
        """
        if self.exponent_bits == 8:
            return self._nearest(x)
        step = self.step(x)
        rounded = (x / step).round() * step
        return rounded.where(rounded.abs() <= self.largest, x.sign() * float("inf")).where(
            ~x.isnan(), x
        )

    def _stochastic(self, x: Tensor, random: Tensor) -> Tensor:
        """Return one of the two neighbours in magnitude, at random.

        The later conversion handles values beyond the largest magnitude.
        """
        import torch

        step = self.step(x)
        return torch.where(
            x.isfinite(), (randomly_up(x.abs() / step, random) * step).copysign(x), x
        )

    def step(self, x: Tensor) -> Tensor:
        """Return the distance between neighbouring values at each magnitude.

        It is a power of two of at least 2^-126.
        """
        import torch

        from lns_ops.formats.bit_views import bit_view

        exponent = bit_view(x, torch.int32) >> _MANTISSA & 0xFF
        field = exponent.clamp(min=self.min_exponent + _BIAS) - self.mantissa_bits
        return bit_view(field.clamp(min=1) << _MANTISSA, torch.float32)


float32 = FloatFormat(
    label="float32", exponent_bits=8, mantissa_bits=23, largest=(2 - 2.0**-23) * 2.0**127
)
tf32 = FloatFormat(
    label="tf32", exponent_bits=8, mantissa_bits=10, largest=(2 - 2.0**-10) * 2.0**127
)
bfloat16 = FloatFormat(
    label="bfloat16", exponent_bits=8, mantissa_bits=7, largest=(2 - 2.0**-7) * 2.0**127
)
float16 = FloatFormat(label="float16", exponent_bits=5, mantissa_bits=10, largest=65504.0)
float8_e4m3fn = FloatFormat(
    label="float8_e4m3fn", exponent_bits=4, mantissa_bits=3, largest=448.0, saturates=True
)
float8_e5m2 = FloatFormat(
    label="float8_e5m2", exponent_bits=5, mantissa_bits=2, largest=57344.0, saturates=True
)

FLOATS = {fmt.name: fmt for fmt in (float32, tf32, bfloat16, float16, float8_e4m3fn, float8_e5m2)}
