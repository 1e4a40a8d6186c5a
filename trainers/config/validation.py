"""Checks of config values, for the ``__post_init__`` of the frozen dataclasses.

Every error message has the value, the rule and the remedy.
"""

from __future__ import annotations

import math
import os


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among ``allowed``.

    Raises:
        ValueError: with ``name``, ``value``, what is allowed and an example.
    """
    if value not in allowed:
        raise ValueError(
            f"{name}={value!r}: must be one of {', '.join(allowed)}; use for example"
            f" {name}={allowed[0]}"
        )


def at_least(name: str, value: int | None, low: int, remedy: str) -> None:
    """Refuse a value that is not a whole number of at least ``low``.

    None, where a key may be left out, passes.

    Raises:
        ValueError: with ``name``, ``value``, the rule and ``remedy``.
    """
    if value is not None and (not isinstance(value, int) or value < low):
        raise ValueError(f"{name}={value}: must be a whole number of at least {low}; {remedy}")


def finite(name: str, value: float | None, low: float, remedy: str) -> None:
    """Refuse a NaN, an infinity, or a value below ``low``.

    None, where a key may be left out, passes.

    Raises:
        ValueError: with ``name``, ``value``, the rule and ``remedy``.
    """
    if value is not None and (not math.isfinite(value) or value < low):
        raise ValueError(f"{name}={value}: must be a finite number of at least {low:g}; {remedy}")


def fits(what: str, size: float, remedy: str) -> None:
    """Refuse a size that the memory of this machine cannot hold.

    Args:
        what: name of what needs the memory.
        size: bytes needed, at the least.
        remedy: what to do about it.

    Raises:
        ValueError: with both sizes and ``remedy``.
    """
    if size > (have := memory()):
        raise ValueError(
            f"{what}: needs {size / 2**30:,.0f} GiB at the least, and this machine has"
            f" {have / 2**30:,.0f}; {remedy}"
        )


def memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def show(value: object) -> str:
    """Return a value as YAML writes it; whole floats without their point, texts without quotes,
    unless they are empty."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    return str(value) or "''"
