"""Torch modules in number formats: converted to LNS, simulated in any format, and back.

:func:`convert_` converts, :func:`simulate_` simulates.
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
