"""LNS formats, under the module name by which saved LNS tensors refer to them.

They are defined in :mod:`lns_ops.spec.format`.
"""

from lns_ops.spec.format import (
    MANTISSA_BITS,
    PRESETS,
    LNSFormat,
    NonFiniteError,
    decode_significands,
    encode_thresholds,
    lns8,
    lns12,
    lns16,
    logarithm,
    single_significands,
    stochastic_steps,
)

__all__ = [
    "MANTISSA_BITS",
    "PRESETS",
    "LNSFormat",
    "NonFiniteError",
    "decode_significands",
    "encode_thresholds",
    "lns8",
    "lns12",
    "lns16",
    "logarithm",
    "single_significands",
    "stochastic_steps",
]
