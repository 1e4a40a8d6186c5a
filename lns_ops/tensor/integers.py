"""Conversion of LNS values to integers: a code that encodes an integer counts as that integer.

In lns16 the number 5 is kept as 4.994 and 6 as 6.004, so rounding down or up, remainders and
``x.long()`` would turn an index into its neighbour. For these an LNS value that is the code of an
integer is that integer: ``x.floor().long()`` is an index, and rounding down twice is rounding down
once.

Limit: beyond ``1 / (2^(2^-f) - 1)`` (184 in lns16, 91 in lns12) integers can share a code; the
first that do are 198 and 199 (93 and 94). The nearest one to the value is taken, and ``x.long()``
of numbers beyond the limit warns.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.spec.format import LNSFormat


def restored(codes: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the float32 values of ``codes``, each the integer that its code stands for, if any."""
    values = lns.decode(codes, fmt)
    nearest = values.round()
    return torch.where(lns.encode(nearest, fmt) == codes, nearest, values)


def limit(fmt: LNSFormat) -> int:
    """Return a number up to which all integers have codes of their own."""
    return int(1 / (2.0 ** (2.0**-fmt.fraction_bits) - 1))


def taken_out(codes: Tensor, fmt: LNSFormat) -> Tensor:
    """Return :func:`restored` values on their way to an integer dtype, and warn of large ones."""
    values, largest = restored(codes, fmt), limit(fmt)
    if _readable(codes) and bool((values.abs() > largest).any()):
        warnings.warn(
            f"integers out of {fmt} beyond {largest}: several share a code there, so {largest + 1}"
            " and its neighbours may be mixed up; give the module indices as an integer tensor, or"
            " leave out the module that makes them (filter_fn of lns_ops.convert_)",
            stacklevel=5,
        )
    return values


def _readable(codes: Tensor) -> bool:
    """Return whether values can be looked at: not while code is traced or a CUDA graph made."""
    if type(codes) is not Tensor or torch.compiler.is_compiling():
        return False
    return not (codes.is_cuda and torch.cuda.is_current_stream_capturing())
