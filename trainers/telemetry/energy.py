"""A model of the energy that a trial's products would need in hardware built for their format.

It is a model, not a measurement: multiply-accumulates, counted by torch's FlopCounterMode, times
published energies of single operations in a 45 nm process at 0.9 V (M. Horowitz, "Computing's
energy problem (and what we can do about it)", ISSCC 2014, figure 1.1.9). For N products with the
energy e(format)::

    E = N e                       e(float32) = 3.7 + 0.9 pJ    multiply, add
                                  e(float16) = 1.1 + 0.9       sums in float32
                                  e(int8)    = 0.2 + 0.1       sums in int32
                                  e(LNS)     = a(b - 1) + 3 a(16) + g

An LNS product adds two logarithms of b - 1 bits; a(n) is the energy of an n-bit integer addition.
An LNS sum needs a comparison, a subtraction and an addition of the accumulator's 16-bit logarithms,
and a look-up of the Gaussian logarithm. The energy g of that look-up has not been measured for
these tables. It is assumed to be :data:`LOOK_UP`, the geometric mean of :data:`LOOK_UP_RANGE`. The
low end of the range is one more 16-bit addition (a few line segments in logic). The high end is the
16-bit share of 10 pJ, the energy of a 64-bit read from 8 KiB of SRAM (the same figure of Horowitz),
a memory that can store both tables up to 7 bits of fraction.

The model ignores the movement of operands (which costs more for wide formats), scales, activations,
losses, and the update of weights: one operation per weight, while the products have three per
weight and example.
"""

from __future__ import annotations

import math

import numpy as np

from lns_ops.formats import Logarithmic, parse
from trainers.config import TrialConfig

ADD_BITS, ADD_PICOJOULES = (8, 16, 32), (0.03, 0.05, 0.1)
"""Energy of an integer addition by its width; interpolated linearly, constant below 8 bits."""
MULTIPLY_ADD = {"float32": 3.7 + 0.9, "float16": 1.1 + 0.9, "int8": 0.2 + 0.1}
"""Energy of a multiplication and an addition in formats other than LNS, in picojoules."""
LOOK_UP_RANGE = (0.05, 2.5)
"""Assumed range of a Gaussian logarithm's look-up energy, in picojoules."""
LOOK_UP = math.sqrt(LOOK_UP_RANGE[0] * LOOK_UP_RANGE[1])
"""Assumed energy of that look-up, 0.354 pJ."""
ACCUMULATOR_BITS = 16
"""Width of the logarithm in which LNS products are summed (:mod:`lns_ops.spec.reference`)."""


def mac_picojoules(name: str, look_up: float = LOOK_UP) -> float:
    """Return the energy of a multiply-accumulate in a number format, in picojoules.

    It is infinite for formats whose operations have no known energy.

    Args:
        name: name of the format, as in ``precision.format``.
        look_up: energy of the look-up of a Gaussian logarithm, in picojoules.

    Raises:
        ValueError: the format does not exist.
    """
    fmt = parse(name)
    if not isinstance(fmt, Logarithmic):
        return MULTIPLY_ADD.get(name, math.inf)
    product, step = np.interp([fmt.lns.bits - 1, ACCUMULATOR_BITS], ADD_BITS, ADD_PICOJOULES)
    return float(product + 3 * step) + look_up


def operator_picojoules(config: TrialConfig, operator: str) -> float:
    """Return the energy of a multiply-accumulate of a torch operator in a trial, in picojoules.

    It is infinite if it is unknown: for formats unknown to :func:`mac_picojoules`, for LNS with
    sums in linear arithmetic, and if gradients or sums have their own format.

    Args:
        config: the trial.
        operator: name of the operator, such as ``lns_ops.matmul`` or ``aten.mm``. With LNS of scope
            ``matmul``, only operators of :mod:`lns_ops` compute in LNS.
    """
    precision = config.precision
    everywhere = precision.scope == "everywhere" or operator.startswith("lns_ops")
    if precision.lns_format is not None and everywhere:
        linear = precision.accumulation != "contract"
        return math.inf if linear else mac_picojoules(precision.format)
    if precision.simulated:
        mixed = precision.gradient_format not in (None, precision.format)
        return (
            math.inf
            if mixed or precision.sum_format is not None
            else mac_picojoules(precision.format)
        )
    return mac_picojoules("float32" if config.autocast == "none" else config.autocast)
