"""Makes the reference page of number formats from the registry of ``lns_ops.formats``."""

from __future__ import annotations

import math

from lns_ops.formats import (
    NVFP4,
    BlockFloatingPoint,
    Integer,
    Logarithmic,
    Microscaling,
    NumberFormat,
    Scaled,
    parse,
)
from lns_ops.formats.blocks.microscaling import ELEMENTS
from lns_ops.formats.floating_point import FLOATS
from lns_ops.formats.tabulated import Listed
from lns_ops.spec.format import PRESETS
from trainers.telemetry.costs import multiply_add

NAMES = (
    *FLOATS,
    "float(4,3)",
    "float(2,1,finite)",
    "float(5,10,inf)",
    "binary8p3",
    "binary8p3sf",
    "binary6p3",
    "posit(8)",
    "posit(16)",
    "posit(8,1)",
    "takum(8)",
    "takum(16)",
    "takum_log(8)",
    "takum_log(16)",
    "bfp(8,32)",
    "fixed(16,8)",
    "int8",
    "int8/channel",
    *ELEMENTS,
    "nvfp4",
    *PRESETS,
    "lns(14,7)",
    "float8_e4m3fn/channel",
    "lns8/channel",
    "lns8/block",
)
"""Every name without parameters, and an example of each kind of name that has some."""


def power(value: float) -> str:
    """Return a number as a power of two; 0 as it is."""
    return f"2^{math.log2(value):.5g}" if value else "0"


def scale_of(fmt: NumberFormat) -> str:
    """Return what values share a scale."""
    if isinstance(fmt, Microscaling):
        return "a power of two for 32 values"
    if isinstance(fmt, NVFP4):
        return "an e4m3 number for 16 values, a float32 number for each tensor"
    if isinstance(fmt, BlockFloatingPoint):
        return f"a power of two for {fmt.block} values"
    if isinstance(fmt, Scaled | Integer):
        kind = "a power of two" if isinstance(fmt, Scaled) else "a factor"
        return f"{kind} for each {fmt.granularity}"
    return "none"


def arithmetic_of(fmt: NumberFormat) -> str:
    """Return in what the products of a network in this format are computed."""
    if isinstance(fmt, Logarithmic):
        return "LNS, on codes"
    if fmt.name == "float32":
        return "float32"
    if fmt.name == "float8_e4m3fn":
        return "simulated; linear layers by `torch._scaled_mm` where there is one"
    return "simulated: float32"


def energy_of(name: str) -> str:
    """Return the modelled energy of a multiply-add with linear sums, its range and its basis."""
    found = multiply_add(name)
    if found is None:
        return "no figure"
    low, likely, high = found.energy
    ends = "" if high - low < 1e-9 else f" ({low:.2g} to {high:.3g})"
    return f"{likely:.3g}{ends}, {found.basis}"


def row(name: str) -> str:
    """Return a format's row."""
    fmt = parse(name)
    error = fmt.error
    unit = " x largest" if error.scaled else ""
    step = error.absolute if isinstance(fmt, Logarithmic) else 2 * error.absolute
    if isinstance(fmt, Listed):
        step = error.smallest
    return (
        f"| `{name}` | {fmt.bits:g} | {power(error.relative)} | {power(error.smallest)}{unit} |"
        f" {power(error.largest)}{unit} | {power(step)}{unit} | {scale_of(fmt)} |"
        f" `{str(fmt.storage).removeprefix('torch.')}` | {arithmetic_of(fmt)} | {energy_of(name)} |"
    )


def page() -> str:
    """Return the page of number formats."""
    return "\n".join(
        [
            "# Number formats",
            "The properties of `lns_ops.formats.parse(name)` for each name; parameters and scales"
            " are examples.",
            "*Unit roundoff* is the largest relative error of rounding to nearest; 0 if steps are"
            " even. For posits and takums it is given around 1, where it is smallest.",
            "*Smallest step* is the distance of neighbours near zero. For LNS without a scale, and"
            " for posits and takums, it is the smallest magnitude; smaller values become zero in"
            " LNS, and the smallest magnitude in posits and takums.",
            "If values share a scale, magnitudes are in units of the largest of these values.",
            "",
            "*Multiply-add* is a model of its energy in 45 nm, in picojoules, with linear sums, its"
            " range, and whether it is published or interpolated"
            " ([sources](../studies/atlas.md#loss-against-bits-and-energy)).",
            "",
            "| name | bits | unit roundoff | smallest | largest | smallest step | scale | stored as"
            " | computed in | multiply-add, pJ |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *map(row, NAMES),
            "",
            "Every name without its own scale takes `/tensor`, `/channel` or `/block` (integers not"
            " `/block`). The benchmarks have [the cost of each](../benchmarks/formats.md).",
            "",
        ]
    )
