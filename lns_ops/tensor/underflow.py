"""A warning where gradients are lost as they enter a format.

A float32 gradient that is encoded (behind a loss; at every product of scope ``matmul``) loses its
entries below the format's smallest magnitude. The first :data:`LOOKS` of them after a conversion
are looked at, so that training pays nothing later and a GPU is waited for in the first passes only;
not while a graph is traced or captured.

Limits: gradients that underflow later, between layers in scope ``everywhere``, or in compiled code
are not seen; :func:`lns_ops.analyze` sees those.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

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
    if not _left or fmt.smallest < torch.finfo(torch.float32).tiny or not _is_real(grad):
        return
    _measure(grad, fmt)


def _is_real(grad: Tensor) -> bool:
    """Return whether there are values to look at: nothing traces, transforms or captures."""
    return (
        type(grad) is Tensor
        and not torch.compiler.is_compiling()
        and not is_transforming()
        and not (grad.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _measure(grad: Tensor, fmt: LNSFormat) -> None:
    """Warn if more than :data:`SHARE` of a gradient underflows, and look at no other one then."""
    global _left
    _left -= 1
    magnitude = grad.detach().abs().double()
    lost = magnitude.where(magnitude < fmt.smallest, 0).sum() / magnitude.sum()
    if lost > SHARE:  # not where all are zero
        _left = 0
        warnings.warn(
            f"gradient of shape {tuple(grad.shape)}: {100 * float(lost):.0f} % of it underflow in"
            f" {fmt}, as entries below {fmt.smallest:.2g} count as 0: sum the loss instead of"
            " averaging it and divide the rate; where a sum's underflow too, scale it by"
            " lns_ops.LossScale(lns_ops.analyze(...).loss_scale)",
            stacklevel=3,
        )
