"""Warnings of what a format's range loses: gradients as they enter it, and counts beyond it.

A float32 gradient that is encoded (behind a loss; at every product of scope ``matmul``) loses its
entries below the format's smallest magnitude. The first :data:`LOOKS` of them after a conversion
are looked at, so that training pays nothing later and a GPU is waited for in the first passes only;
not while a graph is traced or captured.

So is what division by a number above the format's largest loses, of which the gradient of a mean
over as many terms is made. Sums of as many terms that cannot but saturate, inside a softmax, are
warned of every time.

Limits: gradients that underflow later, between layers in scope ``everywhere``, or in compiled code
are not seen; :func:`lns_ops.analyze` sees those.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import is_transforming
from lns_ops.spec.format import LNSFormat

LOOKS = 32
"""How many gradients are looked at after a conversion."""
SHARE = 0.1
"""The part of a gradient, by magnitude, that may be lost without a word.

Not by number: of a softmax that is sure of its classes most entries are lost, and rightly so.
"""
_left = LOOKS


def start_over() -> None:
    """Look at the next :data:`LOOKS` gradients: a network was converted."""
    global _left
    _left = LOOKS


def warn_of_underflow(grad: Tensor, fmt: LNSFormat) -> None:
    """Warn, once a conversion, if much of a float32 gradient underflows in ``fmt``."""
    if not _left or fmt.smallest < torch.finfo(torch.float32).tiny or not is_real(grad):
        return
    _measure(grad, fmt)


def is_real(grad: Tensor) -> bool:
    """Return whether there are values to look at: nothing traces, transforms or captures."""
    return (
        type(grad) is Tensor
        and not torch.compiler.is_compiling()
        and not is_transforming()
        and not (grad.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _measure(grad: Tensor, fmt: LNSFormat) -> None:
    """Warn if more than :data:`SHARE` of a gradient underflows, and look at no other one then."""
    magnitude = grad.detach().abs().double()
    if share := _share(magnitude, magnitude < fmt.smallest):
        warnings.warn(
            f"gradient of shape {tuple(grad.shape)}: {100 * share:.0f} % of it underflow in"
            f" {fmt}, as entries below {fmt.smallest:.2g} count as 0: sum the loss instead of"
            " averaging it and divide the rate; where a sum's underflow too, scale it by"
            " lns_ops.LossScale(lns_ops.analyze(...).loss_scale)",
            stacklevel=3,
        )


def _share(magnitude: Tensor, lost: Tensor) -> float:
    """Return the part of the magnitudes that is lost where it is more than :data:`SHARE`, which
    ends the looking; else 0, as where all are zero."""
    global _left
    _left -= 1
    share = float(magnitude.where(lost, 0).sum() / magnitude.sum())
    if not share > SHARE:
        return 0.0
    _left = 0
    return share


def warn_of_lost(number: float, codes: Tensor, result: Tensor, fmt: LNSFormat) -> None:
    """Warn, once a conversion, if much of codes underflows by division by a large number."""
    if not _left or not is_real(codes):
        return
    if share := _share(lns.decode(codes, fmt, torch.float64).abs(), result == 0):
        warnings.warn(
            f"division by {number:,.10g} in {fmt}: {100 * share:.0f} % of shape"
            f" {tuple(codes.shape)} underflow, as what is below {fmt.smallest:.2g} counts as 0; the"
            " gradient of a mean over as many terms is such a quotient: sum them instead and"
            " divide the rate, or scale the loss by lns_ops.LossScale",
            stacklevel=4,
        )


def warn_of_terms(name: str, terms: int, total: Tensor, fmt: LNSFormat, remedy: str) -> None:
    """Warn if a sum of more terms than the format's largest number has saturated."""
    # not while shapes are symbols
    if not isinstance(terms, int) or terms <= fmt.largest or not is_real(total):
        return
    if bool(((total & fmt.field_mask) == fmt.field_mask).any()):
        warnings.warn(
            f"{name} of {terms:,} values in {fmt}: their sum saturates at {fmt.largest:,.0f}, the"
            f" largest number, and the result is off; {remedy}",
            stacklevel=4,
        )
