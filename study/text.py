"""Figures as people read them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def layout_of(config: Mapping[str, Any]) -> str:
    """Describe how a trial is spread: ``1 worker``, ``dp 2``, ``dp 2 x pp 2``, ``dp 2 sharded``."""
    layout = config.get("layout", {})
    workers, pp, tp = int(config["workers"]), int(layout.get("pp") or 1), int(layout.get("tp") or 1)
    if workers == 1:
        return "1 worker"
    degrees = {"dp": workers // (pp * tp), "pp": pp, "tp": tp}
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return " x ".join(parts) + (" sharded" if layout.get("fsdp") else "")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 trial``, ``3 trials``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def percent(fraction: float) -> str:
    """Return a fraction as per cent with two decimals."""
    return f"{100 * fraction:.2f} %"


def duration(seconds: float) -> str:
    """Return seconds as people say them: ``42 s``, ``3 min``, ``1 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def when(seconds: float) -> str:
    """Return a time in seconds since 1970 as date and UTC time."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
