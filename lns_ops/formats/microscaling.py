"""Microscaling (MX): blocks of 32 values of a narrow float format that share a power of two.

The power takes 8 bits. torchao converts, where it is installed.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification v1.0", 2023. Blocks lie
along the last dimension, which is padded with zeros to a multiple of 32; the scale is the smallest
with which nothing saturates (torchao's ``RCEIL``, NVIDIA's recipe). With the specification's own
choice (``FLOOR``) a block's largest value may saturate by up to 1/8, at every update of a weight:
networks train badly.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lns_ops.formats.base import Encoded, ErrorModel, NumberFormat, as_float32
from lns_ops.formats.floating_point import FloatFormat
from lns_ops.formats.scaling import BLOCK_SIZE, CHANNEL, SCALE_BITS, Scaled

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def unavailable() -> str | None:
    """Say why MX formats cannot be used here; None if they can."""
    if importlib.util.find_spec("torchao") is None:
        return (
            "torchao is not installed, whose conversion MX formats are; pip install 'torchao>=0.18'"
        )
    return None


def _element(exponent_bits: int, mantissa_bits: int, largest: float) -> FloatFormat:
    label = f"e{exponent_bits}m{mantissa_bits}"
    return FloatFormat(
        label=label,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        largest=largest,
        saturates=True,
    )


ELEMENTS: dict[str, tuple[str, FloatFormat]] = {
    "mxfp8_e4m3": ("float8_e4m3fn", _element(4, 3, 448.0)),
    "mxfp8_e5m2": ("float8_e5m2", _element(5, 2, 57344.0)),
    "mxfp6_e3m2": ("fp6_e3m2", _element(3, 2, 28.0)),
    "mxfp6_e2m3": ("fp6_e2m3", _element(2, 3, 7.5)),
    "mxfp4_e2m1": ("float4_e2m1fn_x2", _element(2, 1, 6.0)),
}
"""The MX formats: torch's name of the element's dtype or torchao's, and its format."""
ALIASES = {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e3m2", "mxfp4": "mxfp4_e2m1"}
"""The names without the element format."""


@dataclass(frozen=True)
class Microscaling(NumberFormat):
    """An MX format.

    Args:
        label: one of :data:`ELEMENTS`.

    Raises:
        ValueError: torchao is not installed.
    """

    label: str

    def __post_init__(self) -> None:
        if (reason := unavailable()) is not None:
            raise ValueError(f"{self.label}: {reason}, or use for example float8_e4m3fn/channel")

    @property
    def name(self) -> str:
        """The name, one of :data:`ELEMENTS`: ``mxfp8_e4m3`` and so on."""
        return self.label

    @property
    def element(self) -> FloatFormat:
        """The format within a block."""
        return ELEMENTS[self.label][1]

    @property
    def bits(self) -> float:
        """The bits of an element and of its share of the block's scale."""
        return self.element.bits + SCALE_BITS / BLOCK_SIZE

    @property
    def storage(self) -> torch.dtype:
        """torchao's dtype: float8 dtypes, otherwise bytes (two values each for mxfp4)."""
        import torch

        dtype: torch.dtype = self._dtype
        return dtype if self.label.startswith("mxfp8") else torch.uint8

    @property
    def error(self) -> ErrorModel:
        """The element's error model, scaled to the block's largest magnitude.

        The element's largest magnitude is between one and two times the block's.
        """
        element, half = self.element.error, self.element.largest / 2
        return ErrorModel(
            relative=element.relative,
            absolute=element.absolute / half,
            smallest=element.smallest / half,
            largest=1.0,
            scaled=True,
        )

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return torchao's codes and scales (float8_e8m0fnu, one per block).

        The last dimension is padded to whole blocks.
        """
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        x = as_float32(x)
        length = x.shape[-1] if x.dim() else 1
        blocks = self._blocks(x)
        if random is not None:
            blocks = self._stochastic(blocks, self._blocks(random))
        scale, codes = to_mx(blocks, self._dtype, BLOCK_SIZE, ScaleCalculationMode.RCEIL)
        return Encoded(codes, scale, (*x.shape[:-1], length) if x.dim() else ())

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of torchao's codes."""
        import torch
        from torchao.prototype.mx_formats.mx_tensor import to_dtype

        values: Tensor = to_dtype(
            encoded.codes, encoded.scale, self._dtype, BLOCK_SIZE, torch.float32
        )
        shape = encoded.shape or ()
        return values[..., : shape[-1] if shape else 1].reshape(shape)

    @property
    def _dtype(self) -> Any:
        """The element's dtype as torchao takes it: torch's, or a name of its own."""
        import torch

        name = ELEMENTS[self.label][0]
        return getattr(torch, name, name)

    def _blocks(self, x: Tensor) -> Tensor:
        """Return ``x`` with a last dimension of whole blocks."""
        from torch.nn import functional

        x = x if x.dim() else x[None]
        return functional.pad(x, (0, -x.shape[-1] % BLOCK_SIZE)).contiguous()

    def _stochastic(self, x: Tensor, random: Tensor) -> Tensor:
        """Round at random on the grid of each block's scale.

        torchao's conversion is exact then.
        """
        blocks = Scaled(self.element, CHANNEL)
        return blocks.quantize(x.reshape(-1, BLOCK_SIZE), random.reshape(-1, BLOCK_SIZE)).view_as(x)
