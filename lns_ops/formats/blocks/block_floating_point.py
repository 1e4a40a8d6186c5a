"""Block floating point: whole-number mantissas that share an exponent, ``bfp(bits,block)``.

``block`` values along the last dimension share a power of two with an 8-bit exponent. A value is
``code 2^(exponent - bits + 1)`` with a code of ``bits`` bits: a sign and a magnitude of
``bits - 1`` bits. (Two's complement would have one more code, -2^(bits-1). The range here is
symmetric, so no value rounds to it.) The exponent is the smallest that avoids saturation. Rounding
is to nearest, ties to even. If a row's length is not a multiple of the block, its last block is
shorter, as in microscaling formats (:mod:`lns_ops.formats.blocks.microscaling`).

Sources: J. H. Wilkinson, "Rounding Errors in Algebraic Processes", 1963; for training, M. Drumond
et al., "Training DNNs with Hybrid Block Floating Point", NeurIPS 2018 (arXiv:1804.01526).
"""

from __future__ import annotations

from dataclasses import dataclass

from lns_ops.formats.fixed_point import FIXED_BITS, FixedPoint
from lns_ops.formats.scaling import BLOCK, SCALE_BITS, Scaled

BLOCKS = (2, 16_384)
"""Minimum and maximum number of values of a block."""


@dataclass(frozen=True)
class BlockFloatingPoint(Scaled):
    """A block floating-point format.

    >>> import torch
    >>> fmt = BlockFloatingPoint.of(4, 2)
    >>> fmt.quantize(torch.tensor([7.0, 0.6, 0.6, 0.01])), fmt.bits
    (tensor([7.0000, 1.0000, 0.6250, 0.0000]), 8.0)

    Create one with :meth:`of`.
    """

    @classmethod
    def of(cls, bits: int, block: int) -> BlockFloatingPoint:
        """Return the format with mantissas of ``bits`` bits (2 to 24, including the sign) and
        blocks of ``block`` values.

        Raises:
            ValueError: ``bits`` or ``block`` is out of range.
        """
        low, high = FIXED_BITS
        if not low <= bits <= high:
            raise ValueError(
                f"bfp({bits},{block}): bits={bits} must be from {low} to {high}, because float32"
                " has no more; use for example bfp(8,32)"
            )
        if not BLOCKS[0] <= block <= BLOCKS[1]:
            raise ValueError(
                f"bfp({bits},{block}): block={block} must be from {BLOCKS[0]} to {BLOCKS[1]}; use"
                f" for example bfp({bits},32)"
            )
        return cls(FixedPoint(bits, bits - 1), BLOCK, block)

    @property
    def name(self) -> str:
        """The name: ``bfp(bits,block)``."""
        return f"bfp({self.base.bits:.0f},{self.block})"

    @property
    def bits(self) -> float:
        """The width of a mantissa plus a value's share of the exponent."""
        return self.base.bits + SCALE_BITS / self.block
