"""LNS formats, by the name under which files of LNS tensors know them; defined in
:mod:`lns_ops.spec.format`."""

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
