"""Microscaling (MX): blocks of 32 narrow values that share a power of two of 8 bits (E8M0).

Elements are 8-, 6- and 4-bit floats (``mxfp8``, ``mxfp6``, ``mxfp4``) or 8-bit integers of step
2^-6 (``mxint8``).

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification v1.0", 2023.

Blocks run along the last dimension, which is padded with zeros to a multiple of 32. The scale is
the smallest power of two that avoids saturation (NVIDIA's recipe, torchao's ``RCEIL``). With the
specification's own choice (torchao's ``FLOOR``) a block's largest value may lose up to 1/8 by
saturation, at every update of a weight, and networks train badly. As a result ``mxint8`` does not
use its lowest code, -2, which the specification permits, and has the values of ``bfp(8,32)``.

Codes are torchao's. Values are also torchao's, except in two cases in which torchao computes the
scale less exactly: if a block's largest magnitude is a few float32 ulps above the largest of a
scale, and below 2^-118, where torchao returns zeros. In codes a NaN makes its whole block NaN
(scale 255), as the specification says; :meth:`Microscaling.quantize` keeps the other values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lns_ops.formats.base import Encoded, NumberFormat, as_float32
from lns_ops.formats.fixed_point import FixedPoint
from lns_ops.formats.floating_point import float8_e4m3fn, float8_e5m2
from lns_ops.formats.scaling import BLOCK, BLOCK_SIZE, Scaled
from lns_ops.formats.sized_float import FINITE, SizedFloat

if TYPE_CHECKING:
    from torch import Tensor

ELEMENTS: dict[str, NumberFormat] = {
    "mxfp8_e4m3": float8_e4m3fn,
    "mxfp8_e5m2": float8_e5m2,
    "mxfp6_e3m2": SizedFloat.of(3, 2, FINITE),
    "mxfp6_e2m3": SizedFloat.of(2, 3, FINITE),
    "mxfp4_e2m1": SizedFloat.of(2, 1, FINITE),
    "mxint8": FixedPoint(8, 6),
}
"""The MX formats, with the format of their elements."""
ALIASES = {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e3m2", "mxfp4": "mxfp4_e2m1"}
"""The names without the element format."""


@dataclass(frozen=True)
class Microscaling(Scaled):
    """An MX format.

    >>> import torch
    >>> Microscaling.of("mxint8").quantize(torch.tensor([1.0, 0.3, -0.01]))
    tensor([ 1.0000,  0.2969, -0.0156])

    Create one from its name with :meth:`of`.

    Attributes:
        label: one of :data:`ELEMENTS`.
    """

    label: str = ""

    @classmethod
    def of(cls, label: str) -> Microscaling:
        """Return the format with this name, one of :data:`ELEMENTS`."""
        return cls(ELEMENTS[label], BLOCK, BLOCK_SIZE, label)

    @property
    def name(self) -> str:
        """The name, one of :data:`ELEMENTS`: ``mxfp8_e4m3`` and so on."""
        return self.label

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes, the first in its low bits."""
        return self.base.bits == 4

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return codes and scales (float8_e8m0fnu, one a block).

        The last dimension is padded to whole blocks.
        """
        import torch

        x = as_float32(x)
        shape = x.shape
        blocks = _whole_blocks(x)
        encoded = super().encode(
            blocks.nan_to_num(0.0, torch.inf, -torch.inf),
            None if random is None else _whole_blocks(random),
        )
        assert encoded.scale is not None
        nans = blocks.isnan().unflatten(-1, (-1, BLOCK_SIZE)).any(-1)
        scale = torch.where(nans, torch.nan, encoded.scale).to(torch.float8_e8m0fnu)
        codes = encoded.codes
        if self.packed:
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        return Encoded(codes, scale, tuple(shape))

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of codes."""
        import torch

        assert encoded.scale is not None
        assert encoded.shape is not None
        codes, shape = encoded.codes, encoded.shape
        if self.packed:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        values = super().decode(Encoded(codes, encoded.scale.float()))
        return values[..., : shape[-1] if shape else 1].reshape(shape)


def _whole_blocks(x: Tensor) -> Tensor:
    """Return ``x`` with a last dimension of whole blocks."""
    from torch.nn.functional import pad

    x = x if x.dim() else x[None]
    return pad(x, (0, -x.shape[-1] % BLOCK_SIZE)).contiguous()
