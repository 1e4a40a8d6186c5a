"""The registry of formats by name."""

from __future__ import annotations

import re
from functools import lru_cache

from lns_ops.formats.base import NumberFormat
from lns_ops.formats.fixed_point import FixedPoint, Integer
from lns_ops.formats.floating_point import FLOATS
from lns_ops.formats.logarithmic import Logarithmic
from lns_ops.formats.microscaling import ALIASES, ELEMENTS, Microscaling
from lns_ops.formats.scaling import GRANULARITIES, TENSOR, Scaled
from lns_ops.spec.format import PRESETS, LNSFormat

_WRITTEN = (
    *FLOATS,
    "fixed(bits,fraction_bits)",
    "int8",
    *ALIASES,
    *PRESETS,
    "lns(bits,fraction_bits)",
)
HELP = (
    f"{', '.join(_WRITTEN)}, with a scale for example int8/channel, float8_e4m3fn/tensor,"
    f" lns8/channel ({' or '.join('/' + g for g in GRANULARITIES)})"
)
"""The names that there are, for messages."""


@lru_cache(maxsize=256)
def parse(name: str) -> NumberFormat:
    """Return the format called ``name``.

    >>> parse("lns8/channel").bits, parse("fixed(16,8)").error.largest
    (8, 127.99609375)

    Raises:
        ValueError: no such name, no such format, a scale where there can be none, or MX formats
            without torchao.
    """
    if not isinstance(name, str):
        raise ValueError(f"format {name!r}: must be a name such as 'bfloat16'; there are {HELP}")
    stem, slash, granularity = name.partition("/")
    if slash and granularity not in GRANULARITIES:
        raise ValueError(
            f"format {name!r}: what follows / must be one of {', '.join(GRANULARITIES)}; use for"
            f" example {stem}/channel"
        )
    if match := re.fullmatch(r"int(\d+)", stem):
        return Integer(int(match[1]), granularity or TENSOR)
    return Scaled(_unscaled(stem), granularity) if slash else _unscaled(stem)


def _unscaled(name: str) -> NumberFormat:
    if name in FLOATS:
        return FLOATS[name]
    if ALIASES.get(name, name) in ELEMENTS:
        return Microscaling(ALIASES.get(name, name))
    if match := re.fullmatch(r"fixed\(\s*(-?\d+)\s*,\s*(-?\d+)\s*\)", name):
        return FixedPoint(int(match[1]), int(match[2]))
    if not name.startswith("lns"):
        raise ValueError(f"format {name!r}: there is none of that name; there are {HELP}")
    return Logarithmic(LNSFormat.parse(name))
