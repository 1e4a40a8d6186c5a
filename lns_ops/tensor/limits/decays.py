"""Warnings of decays that a format cannot represent: moving averages, and factors near 1.

*Moving averages*: ``a = d a + (1 - d) x`` changes by less than half an ulp, and so not at all, if
``|x - a| < |a| h / (1 - d)``, with h = 2^(2^-f / 2) - 1: 0.27 % in lns16, 0.54 % in lns12. With d =
0.99 that is 27 % of the value in lns16; multiplications by a number and ``lerp`` warn from there.

*Factors*: ``exp(-0.002)``, the decay of a state-space model's step, rounds to 1 in lns16, and
``exp(-0.003)`` to ``exp(-0.0054)``. ``exp`` warns if rounding changes at least half of its negative
arguments by more than half of their value. The first :data:`LOOKS` results after a conversion are
checked, on a GPU without waiting for them (:mod:`lns_ops.cuda.later`), but not while a graph is
traced or captured. ``exp`` cannot know whether a result multiplies a state again and again, or is
used once, as the standard deviation ``exp(log_sigma)``, because a decay is a new tensor in each
step. So the warning mentions both.

Both losses are inherent in the format: such states belong in float32.
"""

from __future__ import annotations

import math
import warnings
from functools import partial

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.cuda import later
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.limits.underflow import is_real

SHARE = 0.25
"""The relative error at which a moving average may stop without a warning."""
LOOKS = 32
"""Number of results of ``exp`` that are checked after a conversion."""
IN_FLOAT32 = (
    "keep a moving average in float32: AveragedModel(lns_ops.revert_(copy.deepcopy(model)),"
    " multi_avg_fn=...), or a float32 buffer that is changed in place"
)
_left = LOOKS
_conversions = 0
"""Number of conversions and warnings so far; counts from an earlier conversion are ignored."""


def start_over() -> None:
    """Check the next :data:`LOOKS` results, because a network was converted."""
    global _left, _conversions
    _left, _conversions = LOOKS, _conversions + 1


def warn_of_average(what: str, weight: float, fmt: LNSFormat) -> None:
    """Warn if a moving average with this weight of new values stops :data:`SHARE` or more short.

    ``what`` is the operation, for the message.
    """
    half = math.sqrt(1 + fmt.epsilon) - 1
    if 0 < weight < half:
        warnings.warn(
            f"{what} in {fmt}: its new values have a weight below half a step, so a moving average"
            f" never changes; {IN_FLOAT32}",
            stacklevel=4,
        )
    elif 0 < weight < half / SHARE:
        warnings.warn(
            f"{what} in {fmt}: a moving average stops within {100 * half / weight:.0f} % of new"
            f" values, because steps below half an ulp are lost; {IN_FLOAT32}",
            stacklevel=4,
        )


def warn_of_factors(name: str, arguments: Tensor, results: Tensor, fmt: LNSFormat) -> None:
    """Warn, once a conversion, if rounding changes the distance from 1 of most factors below 1.

    On a GPU the warning comes later, when the host has the counts, without waiting for them.
    """
    global _left
    later.look()
    if _left <= 0 or not is_real(arguments) or not arguments.numel():
        return
    _left -= 1
    exact = -torch.expm1(lns.decode(arguments, fmt, torch.float64))
    stored = 1 - lns.decode(results, fmt, torch.float64)
    below = exact > 0
    off = below & ((stored - exact).abs() > exact / 2)
    worst = exact.masked_fill(~off, math.inf).amin()
    counts = torch.stack([off.sum().double(), below.sum().double(), worst])
    later.read(counts, partial(_judge, name, fmt, _conversions))


def _judge(name: str, fmt: LNSFormat, conversions: int, counts: list[float]) -> None:
    """Warn, once a conversion, if at least half of the results below 1 are off."""
    global _left, _conversions
    count, number, worst = counts
    if conversions != _conversions or 2 * count < number or not count:
        return
    _left, _conversions = 0, _conversions + 1  # ignore results that are still being counted
    warnings.warn(
        f"{name} in {fmt}: {count:,.0f} of {number:,.0f} results below 1, such as 1 - {worst:.2g},"
        f" are nearer to 1 than a step of {fmt.epsilon:.2g} and are rounded to 1 or to one step"
        " below it. If they multiply a state again and again, as decays do, it decays too slowly or"
        " too fast: compute them and the state in float32 (x.to_float()), or leave out the module"
        " (filter_fn of lns_ops.convert_). If each is used once, as a standard deviation"
        " exp(log_sigma), its error is at most half a step, and it can stay",
        stacklevel=6,
    )
