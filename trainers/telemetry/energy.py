"""A model of the energy that a trial's products would need in hardware built for their format.

It is a model, not a measurement: multiply-accumulates, counted by torch's FlopCounterMode, times
the energy of one in the format (:mod:`trainers.telemetry.costs`, which has the sources)::

    E = N e

The model ignores the movement of operands (which costs more for wide formats), activations,
losses, and the update of weights: one operation per weight, while the products have three per
weight and example. :func:`trainers.telemetry.costs.training_picojoules` includes memory and update.
"""

from __future__ import annotations

import math

from lns_ops.formats import Logarithmic, parse
from trainers.config import TrialConfig
from trainers.telemetry.costs import LOOK_UP, multiply_add


def mac_picojoules(name: str, look_up: float = LOOK_UP, *, linear_sums: bool = False) -> float:
    """Return the energy of a multiply-accumulate in a number format, in picojoules.

    It is infinite for formats whose operations have no known energy.

    Args:
        name: name of the format, as in ``precision.format``.
        look_up: energy of the look-up of a Gaussian logarithm, in picojoules.
        linear_sums: whether LNS products are summed in linear arithmetic.

    Raises:
        ValueError: the format does not exist.
    """
    found = multiply_add(name, linear_sums=linear_sums)
    if found is None:
        return math.inf
    looks_up = isinstance(parse(name), Logarithmic) and not linear_sums
    return found.energy.likely + (look_up - LOOK_UP if looks_up else 0.0)


def operator_picojoules(config: TrialConfig, operator: str) -> float:
    """Return the energy of a multiply-accumulate of a torch operator in a trial, in picojoules.

    It is infinite if it is unknown: for formats unknown to :func:`mac_picojoules`, and if gradients
    or sums have their own format.

    Args:
        config: the trial.
        operator: name of the operator, such as ``lns_ops.matmul`` or ``aten.mm``. With LNS of scope
            ``matmul``, only operators of :mod:`lns_ops` compute in LNS.
    """
    precision = config.precision
    everywhere = precision.scope == "everywhere" or operator.startswith("lns_ops")
    if precision.lns_format is not None and everywhere:
        linear = precision.accumulation != "contract"
        return mac_picojoules(precision.format, linear_sums=linear)
    if precision.simulated:
        mixed = precision.gradient_format not in (None, precision.format)
        return (
            math.inf
            if mixed or precision.sum_format is not None
            else mac_picojoules(precision.format, linear_sums=True)
        )
    return mac_picojoules("float32" if config.autocast == "none" else config.autocast)
