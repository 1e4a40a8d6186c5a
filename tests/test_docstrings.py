"""The examples in docstrings run and print what they show."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import study
import trainers

ROOT = Path(__file__).parents[1]
MODULES = [
    path.relative_to(ROOT).as_posix()
    for package in ("lns_ops", "trainers", "study")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


class _Output(doctest.OutputChecker):
    """Leaves out the line that a check of trials prints if it takes longer than a second."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, re.sub("(?m)^Checking .*\n", "", got), optionflags)


PUBLIC = [(package, name) for package in (study, trainers) for name in package.__all__]


@pytest.mark.parametrize(
    ("package", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_public_name_has_an_example_that_is_python(package: ModuleType, name: str) -> None:
    text = inspect.getdoc(getattr(package, name)) or ""
    assert "Example::" in text
    for block in re.findall(r"Example::\n\n((?:    .*\n?|\n)+)", text):
        if ">>>" not in block:  # the others run below
            compile(inspect.cleandoc("\n" + block), name, "exec")


@pytest.mark.parametrize("path", MODULES)
def test_docstring_examples_print_what_they_show(path: str) -> None:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    module = importlib.import_module(name)
    parser = doctest.DocTestParser()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(_Output(), optionflags=flags)
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            place = getattr(node, "name", name)
            runner.run(parser.get_doctest(text, vars(module).copy(), place, path, 0))
    assert runner.tries
    assert runner.failures == 0
