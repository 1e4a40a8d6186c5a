"""Conversion of LNS values to integers, and warnings for large integers and angles.

In lns16 the number 5 is stored as 4.994 and 6 as 6.004. Rounding functions, remainders and
``x.long()`` would turn an index into its neighbour. So for these functions an LNS value whose code
is the code of an integer counts as that integer: ``x.floor().long()`` is an index, and rounding
down is idempotent.

Limit: beyond ``1 / (2^(2^-f) - 1)`` (184 in lns16, 91 in lns12) integers can share a code; the
first that do are 198 and 199 (93 and 94). The integer nearest to the value is used, and
``x.long()`` of numbers beyond the limit warns.

An angle has a relative rounding error, too. Beyond some magnitude (145 in lns16, 72 in lns12) the
error is a sixteenth of a turn or more, so its sine has little meaning. :data:`PERIODIC` functions
warn of it once a conversion. On a GPU they check only their first calls, because each check waits
for the GPU.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.spec.format import LNSFormat


def restored(codes: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the float32 values of ``codes``; the code of an integer becomes that integer."""
    values = lns.decode(codes, fmt)
    nearest = values.round()
    return torch.where(lns.encode(nearest, fmt) == codes, nearest, values)


def limit(fmt: LNSFormat) -> int:
    """Return a number up to which all integers have different codes."""
    return int(1 / (2.0 ** (2.0**-fmt.fraction_bits) - 1))


def taken_out(codes: Tensor, fmt: LNSFormat) -> Tensor:
    """Return :func:`restored` values before conversion to an integer dtype; warn of large ones."""
    values, largest = restored(codes, fmt), limit(fmt)
    if _readable(codes) and bool((values.abs() > largest).any()):
        warnings.warn(
            f"integers out of {fmt} beyond {largest}: several share a code there, so {largest + 1}"
            " and its neighbours may be mixed up; pass indices to the module as an integer tensor,"
            " or leave out the module that computes them (filter_fn of lns_ops.convert_)",
            stacklevel=5,
        )
    return values


PERIODIC = {"sin", "cos", "tan", "polar"}
"""The torch functions whose last argument is an angle."""
LOOKS = 32
"""Number of calls that are checked on a GPU after a conversion."""
_left = LOOKS


def start_over() -> None:
    """Check angles again, because a network was converted."""
    global _left
    _left = LOOKS


def largest_angle(fmt: LNSFormat) -> float:
    """Return the smallest angle that rounding to nearest may move by a sixteenth of a turn."""
    return float(math.tau / 16 / (2.0 ** (2.0 ** -(fmt.fraction_bits + 1)) - 1))


def warn_of_angles(name: str, codes: Tensor, fmt: LNSFormat) -> None:
    """Warn, once a conversion, of angles that are rounded by more than a sixteenth of a turn."""
    global _left
    if _left <= 0 or not _readable(codes) or not codes.numel():
        return
    _left -= codes.is_cuda
    limit, largest = largest_angle(fmt), float(lns.decode(codes, fmt).abs().max())
    if largest > limit:
        _left = 0
        share = largest / limit / 16
        warnings.warn(
            f"{name} of up to {largest:.4g} in {fmt}: angles beyond {limit:.0f} are rounded by a"
            f" sixteenth of a turn or more, this one by up to {share:.2g} turns; compute positions,"
            " times and coordinates in float32 (a module with its own forward gets float inputs"
            " unchanged), or leave out the module that computes them (filter_fn of"
            " lns_ops.convert_)",
            stacklevel=5,
        )


def _readable(codes: Tensor) -> bool:
    """Return whether values can be read: code is not traced and no CUDA graph is captured."""
    if type(codes) is not Tensor or torch.compiler.is_compiling():
        return False
    return not (codes.is_cuda and torch.cuda.is_current_stream_capturing())
