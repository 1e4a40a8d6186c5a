"""The operations of LNSTensor, one topic a file.

Importing this package registers them (:func:`lns_ops.tensor.handles`).
"""

from lns_ops.tensor import autograd
from lns_ops.tensor.ops import (
    activations,
    arithmetic,
    attention,
    convolution,
    indexing,
    linear,
    losses,
    normalization,
    ordering,
    padding,
    pooling,
    recurrent,
    reductions,
    structure,
)
from lns_ops.tensor.ops.products import quotients

__all__ = [
    "activations",
    "arithmetic",
    "attention",
    "autograd",
    "convolution",
    "indexing",
    "linear",
    "losses",
    "normalization",
    "ordering",
    "padding",
    "pooling",
    "quotients",
    "recurrent",
    "reductions",
    "structure",
]
