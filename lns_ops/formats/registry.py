"""The registry of formats by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from lns_ops.formats.base import NumberFormat
from lns_ops.formats.blocks.block_floating_point import BlockFloatingPoint
from lns_ops.formats.blocks.microscaling import ALIASES, ELEMENTS, Microscaling
from lns_ops.formats.blocks.nvfp4 import NVFP4
from lns_ops.formats.fixed_point import FixedPoint, Integer
from lns_ops.formats.floating_point import FLOATS
from lns_ops.formats.logarithmic import Logarithmic
from lns_ops.formats.p3109 import P3109
from lns_ops.formats.scaling import GRANULARITIES, TENSOR, Scaled
from lns_ops.formats.sized_float import FINITE, INFINITE, SATURATE, SizedFloat
from lns_ops.formats.tabulated import Table
from lns_ops.formats.tapered import LogarithmicTakum, Posit, Takum
from lns_ops.spec.format import PRESETS, LNSFormat

_WRITTEN = (
    *FLOATS,
    "float(e,m)",
    f"float(e,m,{INFINITE})",
    f"float(e,m,{FINITE})",
    "binary8p3 (binaryKpP, binaryKpPsf)",
    "posit(bits)",
    "posit(bits,es)",
    "takum(bits)",
    "takum_log(bits)",
    "bfp(bits,block)",
    "table(path.npy)",
    "fixed(bits,fraction_bits)",
    "int8",
    *ALIASES,
    "nvfp4",
    *PRESETS,
    "lns(bits,fraction_bits)",
)
HELP = (
    f"{', '.join(_WRITTEN)}, with a scale for example int8/channel, float8_e4m3fn/tensor,"
    f" lns8/channel ({' or '.join('/' + g for g in GRANULARITIES)})"
)
"""The names of all formats, for messages."""


_INTEGERS = r"\(\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?(?:,\s*(\w+)\s*)?\)"
_MADE: dict[str, tuple[int, Callable[..., NumberFormat]]] = {
    "fixed": (2, FixedPoint),
    "float": (2, SizedFloat.of),
    "posit": (1, Posit),
    "takum": (1, Takum),
    "takum_log": (1, LogarithmicTakum),
    "bfp": (2, BlockFloatingPoint.of),
}
"""The constructor for each name with integer arguments, and their number; a posit may have one
more."""


def parse(name: str) -> NumberFormat:
    """Return the format called ``name``.

    >>> parse("lns8/channel").bits, parse("fixed(16,8)").error.largest
    (8, 127.99609375)
    >>> parse("posit(8)").error.largest, parse("float(4,3)").error.largest
    (16777216.0, 240.0)

    Raises:
        ValueError: an unknown name, arguments out of range, a scale for a format without one, or a
            file that does not contain a list of values.
    """
    if not isinstance(name, str):
        raise ValueError(f"format {name!r}: must be a name such as 'bfloat16'; formats are {HELP}")
    if match := re.fullmatch(r"table\((.+)\)(?:/([^/()]*))?", name.strip()):
        table = Table.read(match[1].strip())  # not cached: the file may change
        return table if match[2] is None else _scaled(name, table, match[2])
    return _parse(name)


@lru_cache(maxsize=256)
def _parse(name: str) -> NumberFormat:
    stem, slash, granularity = name.partition("/")
    if slash and granularity not in GRANULARITIES:
        _refuse_granularity(name, stem)
    if match := re.fullmatch(r"int(\d+)", stem):
        return Integer(int(match[1]), granularity or TENSOR)
    return _scaled(name, _unscaled(stem), granularity) if slash else _unscaled(stem)


def _refuse_granularity(name: str, stem: str) -> None:
    raise ValueError(
        f"format {name!r}: the part after / must be one of {', '.join(GRANULARITIES)}; use for"
        f" example {stem}/channel"
    )


def _scaled(name: str, base: NumberFormat, granularity: str) -> NumberFormat:
    if granularity not in GRANULARITIES:
        _refuse_granularity(name, base.name)
    return Scaled(base, granularity)


def _unscaled(name: str) -> NumberFormat:
    if name in FLOATS:
        return FLOATS[name]
    if ALIASES.get(name, name) in ELEMENTS:
        return Microscaling.of(ALIASES.get(name, name))
    if name == "nvfp4":
        return NVFP4()
    if (binary := P3109.named(name)) is not None:
        return binary
    match = re.fullmatch(r"(\w+)" + _INTEGERS, name)
    if match and match[1] in _MADE and (found := _made(*match.groups())) is not None:
        return found
    if not name.startswith("lns"):
        raise ValueError(f"format {name!r}: unknown; formats are {HELP}")
    return Logarithmic(LNSFormat.parse(name))


def _made(kind: str, first: str, second: str | None, end: str | None) -> NumberFormat | None:
    """Return the format with integer arguments; None if their number is wrong."""
    count, make = _MADE[kind]
    given = [int(part) for part in (first, second) if part is not None]
    if end is not None:
        known = kind == "float" and len(given) == count and end in (INFINITE, FINITE, SATURATE)
        return make(*given, end) if known else None
    return make(*given) if len(given) - count in ((0, 1) if kind == "posit" else (0,)) else None
