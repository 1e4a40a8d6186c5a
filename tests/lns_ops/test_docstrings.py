"""The examples in the docstrings of lns_ops run and print what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = {"lns_ops.spec.format": "lns_ops.format"}
"""The module that a class is public in, if it is not the module that defines it."""
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "lns_ops").rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_print_what_they_show(name: str) -> None:
    failed, attempted = doctest.testmod(
        importlib.import_module(PUBLIC.get(name, name)),
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert attempted
    assert failed == 0
