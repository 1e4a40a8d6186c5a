"""What operations in a number format cost in hardware: energy, area, bits.

:func:`multiply_add` and :func:`addition` return the energy of one operation in picojoules, with a
low and a high end. :func:`training_picojoules` adds the operands' way from memory and the update of
weights, with or without Kahan summation. Every figure rests on published ones:

======================  ======  ====================================================================
source                  node    figures
======================  ======  ====================================================================
Horowitz 2014 [1]_      45 nm,  integer addition 0.03, 0.05, 0.1 pJ (8, 16, 32 bits), multiplication
                        0.9 V   0.2, 3.1 pJ (8, 32 bits); float addition 0.4, 0.9 pJ, multiplication
                                1.1, 3.7 pJ (16, 32 bits); 64 bits from 8 KiB of SRAM 10 pJ
Johnson 2018 [2]_       28 nm   a product of logarithms added to a linear sum: in 8 bits 0.96 times
                                the power and 1.12 times the area of an 8-bit integer multiply-add
                                with 32-bit sums, in 16 bits 0.59 times the power and 0.68 times the
                                area of a float16 fused multiply-add
van Baalen 2023 [3]_    -       8-bit floats are 50 to 180 % less efficient than 8-bit integers
======================  ======  ====================================================================

How other formats get a figure (:attr:`Cost.basis` says which way it was):

- *interpolated*: a power law through the two published widths; the ends of the range are
  proportional to either one, with exponent 2 for products of whole numbers and 1 for the rest. A
  float's product is the product of its significands (an integer product) and the rest, which
  follows the width, or at the low end the significand. Below 8 bits for integers, and below 16 for
  floats, this extrapolates. For floats of at most 8 bits the low end is 1.5 times the integer's
  multiply-add [3]_.
- *by a ratio*: LNS with linear sums has [2]_'s ratios of power, times [1]_'s energies, as if both
  units ran at the same clock; interpolated in between. That design sums exactly, not in float32.
- *look-up assumed*: LNS with sums in LNS. A product adds two logarithms of b - 1 bits, a sum needs
  three 16-bit additions and a look-up of the Gaussian logarithm, whose energy is not known. It is
  assumed to be :data:`LOOK_UP`, the geometric mean of :data:`LOOK_UP_RANGE`: from one more 16-bit
  addition (a few line segments in logic) to the 16-bit share of [1]_'s read from 8 KiB, a memory
  that can store both tables up to 7 bits of fraction.
- None, *no figure*: posits, takums and tables. For posits the literature has units "comparable"
  with floats of the same width [4]_ and floats "30 to 60 % faster and smaller" [5]_, and no energy
  that we have read at a node of the others'.

Sums are float32 for floats, 32-bit for integers. A block of integers adds an addition of exponents
(8 bits) and one float32 addition, ``nvfp4`` the product of the scales and one with it. A scale per
tensor or channel is applied once per sum and is not counted.

Area is published as the two ratios of [2]_ alone (:func:`area`).

The model leaves out control, registers, wires and the optimizer's own arithmetic and state, and it
adds stand-alone units: a fused unit costs less. By it an 8-bit float takes 4 times an 8-bit
integer, where [3]_ has 1.5 to 2.8; the low end covers that.

.. [1] M. Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014,
   figure 1.1.9.
.. [2] J. Johnson, "Rethinking floating point for deep learning", 2018, arXiv:1811.01721.
.. [3] M. van Baalen et al., "FP8 versus INT8 for efficient deep learning inference", 2023,
   arXiv:2303.17951.
.. [4] R. Chaurasiya et al., "Parameterized posit arithmetic hardware generator", ICCD 2018.
.. [5] L. Forget, Y. Uguen, F. de Dinechin, "Comparing posit and IEEE-754 hardware cost", 2021,
   hal-03195756v2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lns_ops.formats import Integer, Logarithmic, NumberFormat, parse
from lns_ops.formats.blocks.nvfp4 import BLOCK_LENGTH, ELEMENT, NVFP4
from lns_ops.formats.fixed_point import FixedPoint
from lns_ops.formats.floating_point import FloatFormat, float8_e4m3fn
from lns_ops.formats.scaling import BLOCK, Scaled

INTEGER_ADD = {8: 0.03, 16: 0.05, 32: 0.1}
"""Energy of an integer addition by width, in picojoules; linear in between, constant below 8."""
INTEGER_MULTIPLY = {8: 0.2, 32: 3.1}
"""Energy of an integer multiplication by width, in picojoules."""
FLOAT_ADD, FLOAT_MULTIPLY = {16: 0.4, 32: 0.9}, {16: 1.1, 32: 3.7}
"""Energy of an addition and a multiplication of IEEE floats by width, in picojoules."""
SIGNIFICANDS = {16: 11, 32: 24}
"""Significant bits of those floats."""
SRAM = 10 / 64
"""Energy of a bit that comes from or goes to 8 KiB of SRAM, in picojoules."""
LOOK_UP_RANGE = (0.05, 2.5)
"""Assumed range of a Gaussian logarithm's look-up energy, in picojoules."""
LOOK_UP = math.sqrt(LOOK_UP_RANGE[0] * LOOK_UP_RANGE[1])
"""Assumed energy of that look-up, 0.354 pJ."""
ACCUMULATOR_BITS = 16
"""Width of the logarithm in which LNS products are summed (:mod:`lns_ops.spec.reference`)."""
LINEAR_SUMS = {8: (0.96, 1.12), 16: (0.59, 0.68)}
"""Power and area of a product of logarithms with a linear sum, relative to an integer (8 bits) and
a float (16 bits) multiply-add [2]_."""
NARROW_FLOAT = 1.5
"""Least energy of a narrow float's multiply-add, relative to the integer's of its width [3]_."""
KAHAN_ADDITIONS = 4
"""Additions of an update with Kahan summation; without it there is one."""
PUBLISHED, INTERPOLATED, RATIO, ASSUMED = (
    "published",
    "interpolated",
    "by a ratio",
    "look-up assumed",
)


class Energy(NamedTuple):
    """Picojoules: the low end of what they may be, the likely figure, the high end."""

    low: float
    likely: float
    high: float

    def plus(self, other: Energy | float, times: float = 1.0) -> Energy:
        """Return the sum with another energy, ``times`` over."""
        ends = other if isinstance(other, Energy) else (other,) * 3
        return Energy(*(mine + times * its for mine, its in zip(self, ends, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Energy of an operation, and where the figure is from (see the module's docstring)."""

    energy: Energy
    basis: str


def multiply_add(name: str, *, linear_sums: bool = True) -> Cost | None:
    """Return the energy of a multiplication and an addition to the sum; None without a figure.

    >>> [f"{multiply_add(name).energy.likely:.2f}" for name in ("float32", "int8", "float(4,3)")]
    ['4.60', '0.30', '1.31']
    >>> multiply_add("posit(8)") is None
    True

    Args:
        name: name of the format, as in ``precision.format``.
        linear_sums: whether LNS products are summed in linear arithmetic (``accumulation:
            float32``), rather than in LNS.

    Raises:
        ValueError: the format does not exist.
    """
    return _multiply_add(parse(name), linear_sums)


def addition(name: str) -> Cost | None:
    """Return the energy of an addition of two numbers in a format; None without a figure.

    Elements of a block are added in their own format.

    Raises:
        ValueError: the format does not exist.
    """
    return _addition(parse(name))


def area(name: str) -> float | None:
    """Return a multiply-add's area with linear sums, relative to the integer's (8-bit LNS) or the
    float's (16-bit LNS) of the same width; None for all others: no area is published."""
    fmt = _element(parse(name))
    known = LINEAR_SUMS.get(int(fmt.bits)) if isinstance(fmt, Logarithmic) else None
    return None if known is None else known[1]


def training_picojoules(
    name: str,
    *,
    kahan: bool,
    linear_sums: bool = True,
    products_per_weight: float = 192.0,
    reuse: float = 16.0,
) -> Energy | None:
    """Return the energy of a training step for one multiply-add, moved bits and update included::

        E = mac + 2 b s / reuse + (n add + 2 w s) / products_per_weight

    with b the format's bits, w the bits of a weight (and its compensation), s :data:`SRAM`, and n
    the additions of an update. Returns None without a figure.

    Args:
        name: name of the format.
        kahan: whether weights are updated by Kahan summation.
        linear_sums: as in :func:`multiply_add`.
        products_per_weight: multiply-adds of a step for each weight; three an example in a dense
            layer, so 192 for a batch of 64.
        reuse: multiply-adds for which an operand is read once: an assumption, 1 without any reuse,
            128 in a systolic array of that size.
    """
    fmt = parse(name)
    mac, add = _multiply_add(fmt, linear_sums), _addition(fmt)
    if mac is None or add is None:
        return None
    stored = fmt.bits + (fmt.compensation.bits if kahan else 0)
    update = Energy(0, 0, 0).plus(add.energy, KAHAN_ADDITIONS if kahan else 1)
    moved = mac.energy.plus(2 * fmt.bits * SRAM / reuse)
    return moved.plus(update.plus(2 * stored * SRAM), 1 / products_per_weight)


def _element(fmt: NumberFormat) -> NumberFormat:
    return fmt.base if isinstance(fmt, Scaled) else ELEMENT if isinstance(fmt, NVFP4) else fmt


def _multiply_add(fmt: NumberFormat, linear_sums: bool) -> Cost | None:
    element = _element(fmt)
    if isinstance(element, Logarithmic):
        found = _linear_sums(element.bits) if linear_sums else _lns_sums(element.bits)
    elif isinstance(element, (Integer, FixedPoint)):
        found = _integer(element.bits)
    elif isinstance(element, FloatFormat):
        found = _float(element)
    else:
        return None
    shared = _of_the_block(fmt)
    return Cost(energy=found.energy.plus(shared), basis=found.basis)


def _of_the_block(fmt: NumberFormat) -> Energy | float:
    """Return a product's share of what its block's scales cost."""
    if isinstance(fmt, NVFP4):
        scales = _product(float8_e4m3fn).plus(FLOAT_MULTIPLY[32] + FLOAT_ADD[32])
        return Energy(0, 0, 0).plus(scales, 1 / BLOCK_LENGTH)
    if isinstance(fmt, Scaled) and fmt.granularity == BLOCK:
        return (INTEGER_ADD[8] + FLOAT_ADD[32]) / fmt.block
    return 0.0


def _addition(fmt: NumberFormat) -> Cost | None:
    element = _element(fmt)
    if isinstance(element, Logarithmic):
        return _lns_sums(element.bits, products=False)
    if isinstance(element, (Integer, FixedPoint)):
        add = _integer_add(element.bits)
        known = element.bits in INTEGER_ADD
        return Cost(energy=Energy(add, add, add), basis=PUBLISHED if known else INTERPOLATED)
    if isinstance(element, FloatFormat):
        known = element.bits in FLOAT_ADD
        energy = _across(element.bits, FLOAT_ADD, 1)
        return Cost(energy=energy, basis=PUBLISHED if known else INTERPOLATED)
    return None


def _across(width: float, points: dict[int, float], exponent: int) -> Energy:
    """Return what a width takes, by the power law through two points and in proportion to each."""
    (narrow, low), (wide, high) = points.items()
    slope = math.log(high / low) / math.log(wide / narrow)
    through = low * (width / narrow) ** slope
    ends = low * (width / narrow) ** exponent, high * (width / wide) ** exponent
    if width in points:
        return Energy(*(points[int(width)],) * 3)
    return Energy(*sorted((through, *ends)))


def _integer_add(width: float) -> float:
    return float(np.interp(width, list(INTEGER_ADD), list(INTEGER_ADD.values())))


def _integer(width: float) -> Cost:
    energy = _across(width, INTEGER_MULTIPLY, 2).plus(INTEGER_ADD[32])
    return Cost(energy=energy, basis=PUBLISHED if width in INTEGER_MULTIPLY else INTERPOLATED)


def _product(fmt: FloatFormat) -> Energy:
    """Return the energy of a float's multiplication."""
    if _is_ieee(fmt):
        return Energy(*(FLOAT_MULTIPLY[int(fmt.bits)],) * 3)
    rest = {
        width: FLOAT_MULTIPLY[width] - _across(bits, INTEGER_MULTIPLY, 2).likely
        for width, bits in SIGNIFICANDS.items()
    }
    low, likely, high = _across(fmt.bits, rest, 1)
    significand = fmt.mantissa_bits + 1
    low = min(low, rest[16] * significand / SIGNIFICANDS[16])
    return _across(significand, INTEGER_MULTIPLY, 2).plus(Energy(low, likely, high))


def _is_ieee(fmt: FloatFormat) -> bool:
    return (fmt.bits, fmt.mantissa_bits + 1) in SIGNIFICANDS.items()


def _float(fmt: FloatFormat) -> Cost:
    low, likely, high = _product(fmt).plus(FLOAT_ADD[32])
    if fmt.bits <= 8:
        low = min(low, NARROW_FLOAT * _integer(fmt.bits).energy.likely)
    basis = PUBLISHED if _is_ieee(fmt) else INTERPOLATED
    return Cost(energy=Energy(low, likely, high), basis=basis)


def _linear_sums(width: float) -> Cost:
    multiply_adds = {
        8: INTEGER_MULTIPLY[8] + INTEGER_ADD[32],
        16: FLOAT_MULTIPLY[16] + FLOAT_ADD[16],
    }
    points = {bits: LINEAR_SUMS[bits][0] * energy for bits, energy in multiply_adds.items()}
    return Cost(energy=_across(width, points, 1), basis=RATIO)


def _lns_sums(width: float, products: bool = True) -> Cost:
    steps = 3 * _integer_add(ACCUMULATOR_BITS)
    fixed = steps + (_integer_add(width - 1) if products else 0.0)
    low, high = LOOK_UP_RANGE
    energy = Energy(fixed + low, fixed + LOOK_UP, fixed + high)
    return Cost(energy=energy, basis=ASSUMED)
