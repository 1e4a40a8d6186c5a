"""Loads the code of the studies in ``examples``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Return the module of a file, ``capsules/net`` for ``examples/capsules/net.py``."""
    spec = importlib.util.spec_from_file_location(
        f"example_{name.replace('/', '_')}", FOLDER / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
