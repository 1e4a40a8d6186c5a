"""The examples in the docstrings of lns_ops run and print what they show."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "lns_ops").rglob("*.py"))
    if ">>> " in path.read_text()
]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


@pytest.mark.parametrize("path", MODULES)
def test_docstring_examples_print_what_they_show(path: str) -> None:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    module = importlib.import_module(name)
    parser = doctest.DocTestParser()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            place = getattr(node, "name", name)
            runner.run(parser.get_doctest(text, vars(module).copy(), place, path, 0))
    assert runner.tries
    assert runner.failures == 0
