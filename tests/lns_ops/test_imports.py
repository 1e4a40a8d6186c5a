"""Who imports whom within lns_ops: packages in one order, no file in a cycle, and small files and folders."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lns_ops

PACKAGE = Path(lns_ops.__file__).parent
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
ORDER = (
    "spec", "cpu.compiler", "cpu.kernels", "cpu.simd", "cpu", "cuda", "functional", "formats", "tensor", "tensor.ops", "nn", "optim",
    "analysis",
)  # fmt: skip
"""Each imports from those before it only."""
LAZY = {("lns_ops.analysis.result", "lns_ops.analysis.plot")}
"""``Analysis.plot`` imports what draws it, which names the type of what it draws."""


def imported(path: Path) -> set[str]:
    """The modules of lns_ops that a file names, in functions and for annotations too; the package of each is not counted."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name if (name := f"{node.module}.{alias.name}") in FILES else node.module for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(FILES)


GRAPH = {
    module: {target for target in imported(path) - {module} if (module, target) not in LAZY} for module, path in FILES.items()
}


def package(module: str) -> str | None:
    """The entry of ``ORDER`` that a module is in; None for the package itself and what lies beside its folders."""
    inner = module.partition(".")[2]
    return next((name for name in sorted(ORDER, key=len, reverse=True) if f"{inner}.".startswith(f"{name}.")), None)


def test_no_file_is_in_a_cycle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_packages_import_those_before_them() -> None:
    rank = {name: i for i, name in enumerate(ORDER)}
    wrong = []
    for module, targets in GRAPH.items():
        if (own := package(module)) is not None:
            theirs = {target: package(target) for target in targets}
            wrong += [f"{module} -> {target}" for target, name in theirs.items() if name is None or rank[name] > rank[own]]
    assert wrong == []
    assert {package(module) for module in GRAPH} - {None} == set(ORDER)


def test_functions_import_nothing_of_ours_but_what_draws() -> None:
    inside = set()
    for module, path in FILES.items():
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                inside |= {
                    (module, node.module)
                    for node in ast.walk(function)
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lns_ops")
                }
    assert inside == LAZY


def test_files_and_folders_are_small() -> None:
    assert [str(path) for path in FILES.values() if len(path.read_text().splitlines()) > 500] == []
    folders = Counter(path.parent for path in FILES.values() if path.name != "__init__.py")
    assert [str(folder) for folder, count in folders.items() if count > 14] == []


def test_the_specification_needs_no_torch() -> None:
    for name, path in FILES.items():
        if package(name) == "spec":
            tree = ast.walk(ast.parse(path.read_text()))
            assert "torch" not in {(node.module or "").partition(".")[0] for node in tree if isinstance(node, ast.ImportFrom)}


def test_old_names_stay() -> None:
    """Where documents, checkpoints and programs look for them."""
    code = (
        "import lns_ops, pickle; from lns_ops import accumulation, format, indexed, reference; from lns_ops.tensor import _rebuilt; "
        "print(format.LNSFormat is lns_ops.LNSFormat, reference.adam_update.__name__, indexed.lookup.__name__, accumulation.ACCUMULATIONS, "
        "b'lns_ops.format' in pickle.dumps(lns_ops.lns12), _rebuilt.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True adam_update lookup ('contract', 'float32') True lns_ops.tensor"
