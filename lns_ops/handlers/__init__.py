"""The operations of LNSTensor, one topic a file; importing this package registers them (:func:`lns_ops.tensor.handles`)."""

from lns_ops.handlers import (
    activations,
    arithmetic,
    attention,
    convolution,
    indexing,
    losses,
    normalization,
    ordering,
    pooling,
    recurrent,
    reductions,
    structure,
)

__all__ = [
    "activations",
    "arithmetic",
    "attention",
    "convolution",
    "indexing",
    "losses",
    "normalization",
    "ordering",
    "pooling",
    "recurrent",
    "reductions",
    "structure",
]
