"""How the products of a simulated network are summed: :class:`Accumulation`.

A sum of ``K`` products is split into blocks of ``block`` terms; the last block may be shorter.
Within a block the running sum starts at 0, adds the products in ascending order, and is rounded to
``format`` after every addition. The block sums are also added in ascending order, and rounded to
float32 (``promote="float32"``) or to ``format`` (``promote=None``)::

    s_0 = 0,  s_k = q(s_(k-1) + x_k y_k)          within a block
    t_0 = 0,  t_b = fl(t_(b-1) + s of block b)    over the blocks

With ``order="tree"`` a block is summed in pairs instead, as in an adder tree. Every product is
rounded, then neighbours are added, then the sums of neighbours, until one sum is left. If a level
has an odd number of terms, the last one is carried to the next level. So errors grow only with the
logarithm of the number of terms. With all terms in one block this is pairwise summation::

    s_0k = q(x_k y_k),  s_lk = q(s_(l-1)(2k) + s_(l-1)(2k+1))

A product of two float32 numbers is exact, and the sum before rounding is computed in float64. ``q``
rounds to nearest, ties to even, and saturates or overflows as the format does.

This is a model of hardware accumulators. Hopper's tensor cores keep about 14 bits of a sum of FP8
products, so DeepSeek-V3 adds the sums of 128 terms in float32 (DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024, arXiv:2412.19437, section 3.3.2). Tensor cores add several terms at once and
truncate; this model adds one term at a time and rounds to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lns_ops.formats.floating_point import FloatFormat
from lns_ops.formats.registry import parse

PROMOTIONS = (None, "float32")
ORDERS = ("sequential", "tree")


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """How sums of products are rounded; :mod:`lns_ops.formats.accumulator` has the equations.

    >>> Accumulation(format="float(8,13)", block=128)
    Accumulation(format='float(8,13)', block=128, order='sequential', promote='float32')

    Attributes:
        format: format of the running sum, a binary float: ``float(8,13)``, ``bfloat16``.
        block: number of terms of a block; None for a single block.
        order: order of the additions within a block: ``sequential``, or ``tree``, in pairs.
        promote: ``float32`` if block sums are added in float32, None if they are added in
            ``format``.

    Raises:
        ValueError: ``format`` is not a binary float with a mantissa, or an unknown block, order or
            promotion.
    """

    format: str
    block: int | None = None
    order: str = ORDERS[0]
    promote: str | None = "float32"

    def __post_init__(self) -> None:
        fmt = parse(self.format)
        if not isinstance(fmt, FloatFormat) or not fmt.mantissa_bits:
            raise ValueError(
                f"accumulation: format={self.format!r} must be a binary float with a mantissa,"
                " to which sums are rounded; use for example float(8,13) or bfloat16"
            )
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise ValueError(
                f"accumulation: block={self.block!r} must be a whole number of at least 1; use for"
                " example 128, or None for all terms"
            )
        if self.order not in ORDERS:
            raise ValueError(
                f"accumulation: order={self.order!r} must be one of {', '.join(ORDERS)}; use for"
                " example 'tree', which adds in pairs"
            )
        if self.promote not in PROMOTIONS:
            raise ValueError(
                f"accumulation: promote={self.promote!r} must be 'float32', or None to add the sums"
                f" of blocks in {self.format}; use for example 'float32'"
            )

    @cached_property
    def number_format(self) -> FloatFormat:
        """The format of the running sum."""
        fmt = parse(self.format)
        assert isinstance(fmt, FloatFormat)
        return fmt
