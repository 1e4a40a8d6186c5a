"""Number formats behind one interface, :class:`NumberFormat`.

They include floating point of any width, fixed point, scaled integers, MX and NVFP4 blocks, block
floating point, posits, takums, lists of values, and LNS.

>>> import torch
>>> from lns_ops import formats
>>> fmt = formats.parse("float8_e4m3fn")
>>> fmt.quantize(torch.tensor([0.3, 1000.0]))
tensor([3.1250e-01, 4.4800e+02])
>>> fmt.bits, fmt.error.relative
(8, 0.0625)

:func:`lns_ops.nn.simulate.simulate_` trains networks in any format; :func:`lns_ops.convert_` also
accepts format names.
"""

from lns_ops.formats.accumulator import ORDERS, Accumulation
from lns_ops.formats.base import Encoded, ErrorModel, NumberFormat
from lns_ops.formats.blocks.block_floating_point import BlockFloatingPoint
from lns_ops.formats.blocks.microscaling import Microscaling
from lns_ops.formats.blocks.nvfp4 import NVFP4
from lns_ops.formats.fixed_point import FixedPoint, Integer
from lns_ops.formats.floating_point import (
    FloatFormat,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    tf32,
)
from lns_ops.formats.logarithmic import Logarithmic
from lns_ops.formats.p3109 import P3109
from lns_ops.formats.registry import HELP, parse
from lns_ops.formats.scaling import Scaled
from lns_ops.formats.sized_float import SizedFloat
from lns_ops.formats.stochastic_rounding import random_bits
from lns_ops.formats.tabulated import Table
from lns_ops.formats.tapered import LogarithmicTakum, Posit, Takum

__all__ = [
    "HELP",
    "NVFP4",
    "ORDERS",
    "P3109",
    "Accumulation",
    "BlockFloatingPoint",
    "Encoded",
    "ErrorModel",
    "FixedPoint",
    "FloatFormat",
    "Integer",
    "Logarithmic",
    "LogarithmicTakum",
    "Microscaling",
    "NumberFormat",
    "Posit",
    "Scaled",
    "SizedFloat",
    "Table",
    "Takum",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "parse",
    "random_bits",
    "tf32",
]
