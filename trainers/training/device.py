"""The device that a trial computes on."""

from __future__ import annotations

from lns_ops import cuda


def resolve_device(name: str) -> str:
    """Return ``cuda`` or ``cpu`` for ``auto``, and any other name as it is.

    ``auto`` is ``cuda`` where torch finds a GPU and LNS kernels can run there.
    """
    if name != "auto":
        return name
    return "cpu" if cuda.unavailable() else "cuda"


def check_device(name: str) -> None:
    """Refuse a device that this process does not have.

    Raises:
        ValueError: the device is missing; the message says why.
    """
    if name == "cuda" and (reason := cuda.unavailable()) is not None:
        raise ValueError(f"device=cuda: {reason}; use device=cpu")
