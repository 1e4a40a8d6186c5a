"""Block floating point: whole-number mantissas that share an exponent, ``bfp(bits,block)``.

``block`` values along the last dimension share a power of two, of 8 bits. A value is
``code 2^(exponent - bits + 1)`` with a code of ``bits`` bits: a sign and a magnitude of
``bits - 1`` bits. (Two's complement would have one more code, -2^(bits-1), which nothing rounds to
here: the range is symmetric.) The exponent is the smallest with which nothing saturates, rounding
is to nearest, ties to even. Where a row's length is no multiple of the block, its last block has
fewer values, as in microscaling formats (:mod:`lns_ops.formats.blocks.microscaling`).

Sources: J. H. Wilkinson, "Rounding Errors in Algebraic Processes", 1963; for training, M. Drumond
et al., "Training DNNs with Hybrid Block Floating Point", NeurIPS 2018 (arXiv:1804.01526).
"""

from __future__ import annotations

from dataclasses import dataclass

from lns_ops.formats.fixed_point import FIXED_BITS, FixedPoint
from lns_ops.formats.scaling import BLOCK, SCALE_BITS, Scaled

BLOCKS = (2, 16_384)
"""Fewest and most values of a block."""


@dataclass(frozen=True)
class BlockFloatingPoint(Scaled):
    """A block floating-point format.

    >>> import torch
    >>> fmt = BlockFloatingPoint.of(4, 2)
    >>> fmt.quantize(torch.tensor([7.0, 0.6, 0.6, 0.01])), fmt.bits
    (tensor([7.0000, 1.0000, 0.6250, 0.0000]), 8.0)

    :meth:`of` makes one.
    """

    @classmethod
    def of(cls, bits: int, block: int) -> BlockFloatingPoint:
        """Return the format of mantissas of ``bits`` bits, sign included, 2 to 24, and ``block``
        values.

        Raises:
            ValueError: no such format.
        """
        low, high = FIXED_BITS
        if not low <= bits <= high:
            raise ValueError(
                f"bfp({bits},{block}): bits={bits} must lie from {low} to {high}, as float32"
                " carries no more; use for example bfp(8,32)"
            )
        if not BLOCKS[0] <= block <= BLOCKS[1]:
            raise ValueError(
                f"bfp({bits},{block}): block={block} must lie from {BLOCKS[0]} to {BLOCKS[1]}; use"
                f" for example bfp({bits},32)"
            )
        return cls(FixedPoint(bits, bits - 1), BLOCK, block)

    @property
    def name(self) -> str:
        """The name: ``bfp(bits,block)``."""
        return f"bfp({self.base.bits:.0f},{self.block})"

    @property
    def bits(self) -> float:
        """The width of a mantissa, and a value's share of the exponent."""
        return self.base.bits + SCALE_BITS / self.block
