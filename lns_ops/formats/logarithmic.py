"""LNS as a :class:`~lns_ops.formats.NumberFormat`, around :class:`lns_ops.format.LNSFormat`.

Networks in LNS normally compute in LNS throughout (:func:`lns_ops.convert_`). As a NumberFormat,
LNS is only a set of values like any other format. Use it to compare formats, and for LNS with a
scale (``lns8/channel``), which LNS arithmetic does not support.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from lns_ops.formats.base import Encoded, ErrorModel, NumberFormat, as_float32
from lns_ops.spec.format import LNSFormat, NonFiniteError, stochastic_steps

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@lru_cache(maxsize=32)
def _steps(fraction_bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the steps of stochastic encoding as tensors cached on the device.

    A CUDA graph cannot copy them there during capture.
    """
    import torch

    mantissas, reciprocals = (
        torch.tensor(table, device=device) for table in stochastic_steps(fraction_bits)
    )
    return mantissas, reciprocals


@dataclass(frozen=True)
class Logarithmic(NumberFormat):
    """The values of an LNS format.

    >>> import torch
    >>> from lns_ops.formats import parse
    >>> parse("lns8/channel").quantize(torch.tensor([[1.0, 0.3], [100.0, 30.0]]))
    tensor([[ 1.0000,  0.2973],
            [98.7015, 29.3441]])

    Args:
        lns: the format.
    """

    lns: LNSFormat

    @property
    def name(self) -> str:
        """The LNS format's name."""
        return self.lns.name

    @property
    def bits(self) -> float:
        """The LNS format's width."""
        return self.lns.bits

    @property
    def storage(self) -> torch.dtype:
        """The dtype of codes: int16 for all widths."""
        import torch

        return torch.int16

    @property
    def error(self) -> ErrorModel:
        """The error model: half a step of the logarithm; values that underflow are lost."""
        half = 2.0 ** (0.5 / 2**self.lns.fraction_bits)
        # 2^-22: decoded values and thresholds are rounded to float32.
        return ErrorModel(
            relative=(half - 1) * (1 + 2.0**-16) + 2.0**-22,
            absolute=self.lns.smallest,
            smallest=self.lns.smallest,
            largest=self.lns.largest,
        )

    @property
    def kernel(self) -> LNSFormat:
        """The LNS format."""
        return self.lns

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return the LNS codes of ``x``."""
        from lns_ops import functional as lns

        x = as_float32(x)
        return Encoded(lns.encode(x, self.lns) if random is None else self._stochastic(x, random))

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of LNS codes."""
        from lns_ops import functional as lns

        return lns.decode(encoded.codes, self.lns)

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded to the format; NaNs and infinities are not changed.

        On a GPU they are counted as faults, and the result is some value.
        """
        import torch

        x = as_float32(x)
        try:
            return super().quantize(x, random)
        except NonFiniteError:
            finite = x.isfinite()
            return torch.where(finite, super().quantize(torch.where(finite, x, 0), random), x)

    def _stochastic(self, x: Tensor, random: Tensor) -> Tensor:
        """Encode at random, as :func:`lns_ops.reference.encode_stochastic` does.

        It is a kernel on a CPU and torch operations elsewhere.
        """
        if x.device.type == "cpu":
            import torch

            from lns_ops import cpu

            return torch.from_numpy(
                cpu.encode_stochastic(x.detach().numpy(), self.lns, random.numpy().astype("uint16"))
            )
        return self._stochastic_anywhere(x, random)

    def _stochastic_anywhere(self, x: Tensor, random: Tensor) -> Tensor:
        import torch

        f = self.lns.fraction_bits
        mantissas, reciprocals = _steps(f, x.device)
        fraction, exponent = torch.frexp(x.abs())
        mantissa = (fraction * (1 << 24)).to(torch.int64).sub_(1 << 23).clamp_(min=0)
        j = torch.searchsorted(mantissas, mantissa, right=True) - 1
        chance = (mantissa - mantissas[j]) * reciprocals[j] >> 24
        log = ((exponent.to(torch.int64) - 1) << f) + j + (chance + random >> 16)
        field = (log + self.lns.bias).clamp(max=self.lns.field_mask)
        nonzero = (x != 0) & (field > 0)
        codes = torch.where(x < 0, field | self.lns.sign_mask, field)
        return torch.where(nonzero, codes, 0).to(torch.int16)
