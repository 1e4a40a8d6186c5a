"""Which code and which packages produced a study: enough to run it again.

The git commit is that of the checkout this package is imported from; an installed copy outside git has none and says so.
"""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("lns-study", "torch", "numpy", "numba", "ray", "mlflow", "omegaconf")


@cache
def provenance() -> dict[str, Any]:
    """Git commit (or None), whether the checkout differs from it, package versions, Python, platform and CPU count."""
    return {"commit": _git("rev-parse", "HEAD"), "dirty": _dirty(), "versions": _versions(), "python": platform.python_version(),
            "platform": platform.platform()}  # fmt: skip


def _dirty() -> bool | None:
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    """Standard output of a git command in this package's folder; None outside a checkout or without git."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
