"""Random draws in float32, encoded within the bounds that torch guarantees.

``exponential_`` draws numbers above 0, so code takes their logarithm; ``uniform_(0, 1)`` draws
numbers below 1. Rounding to nearest would make some of them 0 or 1: in lns12 one exponential draw
in 131,000 is below the smallest magnitude, and one uniform draw in 93 is nearest to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.spec.format import LNSFormat

_POSITIVE = {"exponential_", "log_normal_", "_standard_gamma", "_sample_dirichlet"}
_UNIT = {"rand_like"}
DRAWS = _POSITIVE | _UNIT
"""Functions that draw in float32 and never return 0, or a number outside [0, 1)."""
_TINY, _EPS = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).eps


def encoded(values: Tensor, fmt: LNSFormat, name: str) -> Tensor:
    """Return the codes of numbers drawn by the function ``name``, one of :data:`DRAWS`."""
    bounds = (0.0, 1.0) if name in _UNIT else (0.0, float("inf"))
    return within(values, *bounds, fmt)


def bounded(values: Tensor, fmt: LNSFormat, name: str) -> Tensor:
    """Return draws as float32 numbers with the codes of :func:`encoded`, keeping their gradient."""
    fixed = values.detach()
    return values + (lns.decode(encoded(fixed, fmt, name), fmt) - fixed)


def within(values: Tensor, low: float, high: float, fmt: LNSFormat) -> Tensor:
    """Return the codes of draws from [low, high), rounded to nearest within these bounds.

    Nonzero draws stay nonzero. If no code is within the bounds, the nearest code is used.
    """
    codes = lns.encode(values, fmt)
    key = lns.order_key(codes, fmt)
    key = torch.where(key == 0, values.sign().to(key.dtype), key)  # +-1 is the smallest magnitude
    rounded = lns.decode(lns.from_key(key, fmt), fmt, torch.float64)
    step = ((rounded < low) & (values >= low)).to(key.dtype)
    step -= ((rounded >= high) & (values < high)).to(key.dtype)
    moved = lns.from_key(key + step, fmt)
    value = lns.decode(moved, fmt, torch.float64)
    return torch.where((value >= low) & (value < high), moved, codes)


def own_limit(value: object, fmt: LNSFormat) -> object:
    """Replace a limit of ``torch.finfo(torch.float32)`` by the format's; return others unchanged.

    LNSTensors have the dtype float32, so code uses its limits. For example
    torch.distributions.Gumbel draws between ``tiny`` and ``1 - eps``, and takes two logarithms.
    """
    below_one = 1 / (1 + fmt.epsilon)
    own = {_TINY: fmt.smallest, 1 - _EPS: below_one, _EPS - 1: -below_one}
    return own.get(value, value) if type(value) is float else value
