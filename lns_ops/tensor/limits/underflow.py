"""Warnings of losses by a format's range: underflow of gradients, and counts beyond the range.

When a float32 gradient is encoded (behind a loss, and at every product of scope ``matmul``), its
entries below the format's smallest magnitude are lost. The first :data:`LOOKS` gradients after a
conversion are checked. So later training has no overhead, and only the first passes wait for a GPU.
Nothing is checked while a graph is traced or captured.

Division by a number above the format's largest is checked in the same way, because the gradient of
a mean over that many terms is such a quotient. Sums of that many terms inside a softmax must
saturate, and warn every time.

Limits: gradients that underflow later, between layers in scope ``everywhere``, or in compiled code
are not checked; :func:`lns_ops.analyze` finds these.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import is_transforming
from lns_ops.spec.format import LNSFormat

LOOKS = 32
"""Number of gradients that are checked after a conversion."""
SHARE = 0.1
"""The fraction of a gradient, by magnitude, that may be lost without a warning.

It is not by number, because a softmax with confident classes rightly loses most entries.
"""
_left = LOOKS


def start_over() -> None:
    """Check the next :data:`LOOKS` gradients, because a network was converted."""
    global _left
    _left = LOOKS


def warn_of_underflow(grad: Tensor, fmt: LNSFormat) -> None:
    """Warn, once a conversion, if much of a float32 gradient underflows in ``fmt``."""
    if not _left or fmt.smallest < torch.finfo(torch.float32).tiny or not is_real(grad):
        return
    _measure(grad, fmt)


def is_real(grad: Tensor) -> bool:
    """Return whether values can be read: no tracing, no transform, no capture."""
    return (
        type(grad) is Tensor
        and not torch.compiler.is_compiling()
        and not is_transforming()
        and not (grad.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _measure(grad: Tensor, fmt: LNSFormat) -> None:
    """Warn if more than :data:`SHARE` of a gradient underflows, and then stop checking."""
    magnitude = grad.detach().abs().double()
    if share := _share(magnitude, magnitude < fmt.smallest):
        warnings.warn(
            f"gradient of shape {tuple(grad.shape)}: {100 * share:.0f} % of it underflow in"
            f" {fmt}, because entries below {fmt.smallest:.2g} become 0: sum the loss instead of"
            " averaging it and divide the rate; if gradients of a sum underflow, too, scale it by"
            " lns_ops.LossScale(lns_ops.analyze(...).loss_scale)",
            stacklevel=3,
        )


def _share(magnitude: Tensor, lost: Tensor) -> float:
    """Return the lost fraction of the magnitudes if it exceeds :data:`SHARE`, and stop checking;
    otherwise return 0, also if all are zero."""
    global _left
    _left -= 1
    share = float(magnitude.where(lost, 0).sum() / magnitude.sum())
    if not share > SHARE:
        return 0.0
    _left = 0
    return share


def warn_of_lost(number: float, codes: Tensor, result: Tensor, fmt: LNSFormat) -> None:
    """Warn, once a conversion, if division by a large number makes many codes underflow."""
    if not _left or not is_real(codes):
        return
    if share := _share(lns.decode(codes, fmt, torch.float64).abs(), result == 0):
        warnings.warn(
            f"division by {number:,.10g} in {fmt}: {100 * share:.0f} % of shape"
            f" {tuple(codes.shape)} underflow, because values below {fmt.smallest:.2g} become 0;"
            " the gradient of a mean over that many terms is such a quotient: sum them instead and"
            " divide the rate, or scale the loss by lns_ops.LossScale",
            stacklevel=4,
        )


def warn_of_terms(name: str, terms: int, total: Tensor, fmt: LNSFormat, remedy: str) -> None:
    """Warn if a sum of more terms than the format's largest number has saturated."""
    # skipped while shapes are symbolic
    if not isinstance(terms, int) or terms <= fmt.largest or not is_real(total):
        return
    if bool(((total & fmt.field_mask) == fmt.field_mask).any()):
        warnings.warn(
            f"{name} of {terms:,} values in {fmt}: their sum saturates at {fmt.largest:,.0f}, the"
            f" largest number, and the result is off; {remedy}",
            stacklevel=4,
        )
