"""Conversion of torch modules to number formats and back.

:func:`convert_` converts a module to LNS. :func:`simulate_` trains it in any other number format.
"""

from lns_ops.nn.choice import Filter, Format
from lns_ops.nn.convert import SCOPES, Conversion, convert_, revert_
from lns_ops.nn.description import summary
from lns_ops.nn.matmul_layers import LNSMatmulLinear
from lns_ops.nn.simulate import Simulation, simulate_

__all__ = [
    "SCOPES", "Conversion", "Filter", "Format", "LNSMatmulLinear", "Simulation", "convert_",
    "revert_", "simulate_", "summary",
]  # fmt: skip
