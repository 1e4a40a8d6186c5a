"""The architecture as a test: imports go from study to trainers to lns_ops only, rooms import in
one order, and each big library is imported in one package."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "lns_ops": {"lns_ops"},
    "trainers": {"trainers", "lns_ops"},
    "study": {"study", "trainers", "lns_ops"},
}
OWNERS = {"mlflow": {"study"}, "omegaconf": {"study"}, "ray": {"study", "trainers"}}


ORDER = {
    "lns_ops": [
        "_compat", "spec", "cpu.compiler", "cpu.kernels", "cpu.simd", "cpu", "cuda", "functional",
        "formats", "tensor", "tensor.ops", "nn.products", "nn", "optim", "analysis",
    ],
    "trainers": [
        "_compat", "text", "settings", "descendants", "output", "user_code", "object_store",
        "files", "config", "user_loop", "data", "models", "optim", "checkpoint", "telemetry",
        "comm", "sync", "parallel", "training", "workers",
    ],
    "study": [
        "text", "tracking_uri", "program", "errors", "_compat", "config", "ledger", "plan",
        "results", "evidence", "claims", "search", "tracking", "engines", "report.figures",
        "report", "evidence.reproduction", "evidence.verify_pages", "evidence.verify", "views",
        "ops.repair", "ops.serve", "lifecycle", "api", "ops.launch", "cli", "__main__",
    ],
}  # fmt: skip
"""The rooms of each package; a room imports only from earlier rooms. Modules that only re-export
names are not listed."""
PARSERS = {
    f"study.cli.{name}"
    for name in (
        "data",
        "doctor",
        "launch",
        "manage",
        "plan",
        "report",
        "reproduce",
        "run",
        "stored",
        "tracking",
        "ui",
    )
}
"""Modules whose commands import their dependencies when they are called, because completion and
``--help`` wait for the others: 0.1 s of CPU time."""
LAZY = {
    ("lns_ops.formats.base", "lns_ops"): "1.8 s, of torch and numba, which no name needs",
    ("lns_ops.formats.base", "lns_ops._compat"): "1.8 s, of torch, which no name needs",
    ("lns_ops.formats.base", "lns_ops.functional.elementwise"): "1.8 s, the same",
    ("lns_ops.formats.blocks.nvfp4", "lns_ops.formats.bit_views"): "1.8 s, the same",
    ("lns_ops.formats.fixed_point", "lns_ops"): "1.8 s, of torch and numba, the same",
    ("lns_ops.formats.fixed_point", "lns_ops.formats.bit_views"): "1.8 s, the same",
    ("lns_ops.formats.floating_point", "lns_ops"): "1.8 s, the same",
    ("lns_ops.formats.floating_point", "lns_ops.formats.bit_views"): "1.8 s, the same",
    ("lns_ops.formats.logarithmic", "lns_ops"): "1.8 s, the same",
    ("lns_ops.formats.p3109", "lns_ops.formats.bit_views"): "1.8 s, the same",
    ("lns_ops.formats.scaling", "lns_ops"): "1.8 s, the same",
    ("lns_ops.formats.scaling", "lns_ops.formats.bit_views"): "1.8 s, the same",
    ("lns_ops.formats.tabulated", "lns_ops"): "1.8 s, the same",
    ("lns_ops.formats.sized_float", "lns_ops.formats.bit_views"): "1.8 s, the same",
    ("lns_ops.formats.tabulated", "lns_ops.formats.list_rounding"): "1.8 s, the same",
    ("lns_ops.formats.stochastic_rounding", "lns_ops"): "1.8 s, the same",
    (
        "study.lifecycle",
        "study.report.write",
    ): "draws with what takes 1.6 s, as the first trial trains",
    (
        "study.engines.preflight",
        "trainers.workers.worker_process",
    ): "2.5 s, of torch, and a node mostly checks",
    ("study.engines.ray.start", "study.engines.ray.hosts"): "2.4 s, of Ray Tune; and Ray"
    " reads its token's variables when it is loaded",
    ("study.engines.ray.start", "study.engines.ray.run"): "2.4 s, the same",
    ("study.engines.ray.scripts", "trainers.workers.executors"): "2.5 s, of torch, in a driver",
    ("study.api", "study.engines.ray.study_tuner"): "2.4 s, of Ray Tune",
    ("study.api", "study.views.console"): "0.1 s, of rich, as a study starts",
    ("study.api", "study.views.notebook"): "shows what is drawn",
    ("study.api", "study.report.figures.style"): "draws with what takes 1.6 s",
    ("study.api", "study.report.interactive"): "draws with what takes 1.6 s",
    ("study.api", "study.report.pictures"): "draws with what takes 1.6 s",
    (
        "study.plan.trials",
        "trainers.training.check",
    ): "2.5 s, of torch, where an optimizer is searched",
    ("study.plan.trials", "trainers.workers.process_reset"): "2.5 s, the same",
    ("study.views.view", "study.views.notebook"): "1 s, of matplotlib",
    ("study.views.view", "study.views.progress"): "0.1 s, of rich",
    ("trainers.data", "trainers.data.datasets"): "1.8 s, of torch",
    ("trainers.data.descriptions", "trainers.data.datasets"): "1.8 s, of torch",
    ("trainers.object_store", "trainers._compat"): "1 s, of torch",
    ("trainers.parallel.choice", "trainers.parallel.fsdp"): "0.8 s, of torch's sharding",
    ("trainers.parallel.choice", "trainers.parallel.tensor_parallel"): "0.8 s, the same",
    ("trainers.sync.choice", "trainers.sync.async_client"): "0.6 s, of Ray",
    ("trainers.training.device", "lns_ops"): "1.8 s, of torch",
    ("trainers.training.build", "trainers.parallel.pipeline"): "0.6 s, of torch's compiler",
    ("trainers.workers.fork_server", "trainers.config"): "2.3 s, by which it answers before",
    ("trainers.workers.fork_server", "trainers.data"): "2.3 s, the same",
    ("trainers.workers.fork_server", "trainers.workers.in_process"): "2.3 s, the same",
    ("trainers.workers.fork_server", "trainers.workers.own_loop"): "2.3 s, the same",
    ("trainers.workers.fork_server", "trainers.workers.worker_process"): "2.3 s, the same",
}
"""Imports of our modules inside functions, and the CPU time that they save for processes that do
not need them (two cores of an AMD EPYC, Python 3.11)."""
BY_NAME = {
    "lns_ops/__init__.py": "its public names, with torch",
    "study/__init__.py": "its public names, when one is used",
    "study/evidence/judge.py": "a claim's own function gets the handle that users have, of a"
    " room above: the one call upwards",
    "trainers/user_code.py": "the user's modules",
    "trainers/workers/executors.py": "the room of one kind of executor, of those above this module",
}
"""Files that import a module by a computed name, which the other rules here cannot see."""
LONGER = {
    "lns_ops/cpu/simd/avx2.py:_addition",
    "lns_ops/cpu/simd/avx512.py:matmul",
    "lns_ops/cpu/simd/avx512.py:product",
    "lns_ops/cpu/simd/reduce.py:_kernels",
}
"""Kernels of more than :data:`FUNCTION` lines."""
FILE, FUNCTION, FOLDER, LINE = 800, 50, 14, 100
"""Maximum lines of a file and of a function with its docstring, maximum files of a folder besides
``__init__.py``, and maximum characters of a line."""
CODE = {"", ".cu", ".cuh", ".css", ".h", ".j2", ".js", ".py", ".sh", ".toml", ".txt", ".yaml"}
"""Suffixes of code files."""


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


SOURCES = [
    (package, path) for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))
]


@pytest.mark.parametrize(
    ("package", "path"), SOURCES, ids=[str(p.relative_to(ROOT)) for _, p in SOURCES]
)
def test_import_direction(package: str, path: Path) -> None:
    tops = {name.split(".")[0] for name in imports_of(path)}
    assert tops & set(MAY_IMPORT) <= MAY_IMPORT[package]
    assert all(package in owners for library, owners in OWNERS.items() if library in tops)


def test_modules_are_imported_by_name_where_that_is_listed() -> None:
    named = re.compile(r"\b(import_module|__import__)\(")
    found = [path for _, path in SOURCES if named.search(path.read_text())]
    assert {str(path.relative_to(ROOT)) for path in found} == BY_NAME.keys()


@pytest.mark.parametrize("path", [p for _, p in SOURCES if _ == "trainers"], ids=lambda p: p.name)
def test_trainers_leave_tune_to_study(path: Path) -> None:
    assert not any(name.startswith("ray.tune") for name in imports_of(path))


@pytest.mark.parametrize("path", [p for _, p in SOURCES if _ == "study"], ids=lambda p: p.name)
def test_study_leaves_train_to_trainers(path: Path) -> None:
    assert not any(name.startswith("ray.train.torch") for name in imports_of(path))


def is_private(name: str) -> bool:
    """Return whether a name, or a part of a dotted one, begins with one underscore."""
    return any(part[:1] == "_" and part[:2] != "__" for part in name.split("."))


def private_names(source: str) -> set[str]:
    """Return other projects' private names that a module imports, or uses from its imports."""
    others: set[str] = set()
    found: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, module = node.names, ""
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names, module = node.names, f"{node.module}."
        else:
            continue
        for alias in names:
            name = module + alias.name
            if name.split(".")[0] in {*MAY_IMPORT, *sys.stdlib_module_names}:
                continue
            others.add(alias.asname or alias.name.split(".")[0])
            if is_private(name):
                found.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            root, _, rest = name.partition(".")
            if re.fullmatch(r"[\w.]+", name) and root in others and is_private(rest):
                found.add(name)
    return found


@pytest.mark.parametrize(
    "path",
    [path for _, path in SOURCES if path.name != "_compat.py"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_private_names_of_others_are_in_one_room(path: Path) -> None:
    """Each one in ``_compat.py`` has a reason, a version and a test that reports a change."""
    assert private_names(path.read_text()) == set()


def test_private_names_are_found() -> None:
    source = (
        "import torch, os\nimport numpy as np\nfrom ray._private import services\n"
        "from ray import _raylet\nfrom study._compat import x\ntorch._C.f()\nnp.core._ufunc\n"
        "os._exit\ntorch.__version__\nself._own"
    )
    assert private_names(source) >= {
        "ray._private.services", "ray._raylet", "torch._C", "torch._C.f", "np.core._ufunc"
    }  # fmt: skip
    assert not any(
        "study" in name or "os." in name or "__" in name for name in private_names(source)
    )


FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for _, path in SOURCES
}


def dependencies(module: str) -> set[str]:
    """Return our modules that a module imports, also inside functions and for annotations."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                name if (name := f"{node.module}.{alias.name}") in FILES else node.module
                for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(FILES) - {module}


def inside_functions(module: str) -> set[str]:
    """Return our modules that functions of a module import when they are called."""
    return {
        name
        for function in ast.walk(ast.parse(FILES[module].read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
        if name and name.partition(".")[0] in MAY_IMPORT
    }


def test_functions_import_only_what_others_should_not_wait_for() -> None:
    modules = set(FILES) - PARSERS
    assert {(module, name) for module in modules for name in inside_functions(module)} == set(LAZY)


def test_the_command_line_waits_for_no_library() -> None:
    code = (
        "import sys, study.cli.entry; study.cli.entry.build_parser(); print([m for m in ('torch',"
        " 'numpy', 'ray', 'mlflow', 'omegaconf', 'rich') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


GRAPH = {module: dependencies(module) for module in FILES}


def room(module: str) -> tuple[str, int] | None:
    """Return the package of a module and the position of its room there; None for modules that only
    re-export names."""
    package, _, inner = module.partition(".")
    places = [
        (len(name), place)
        for place, name in enumerate(ORDER[package])
        if f"{inner}.".startswith(f"{name}.")
    ]
    return (package, max(places)[1]) if places else None


def test_no_module_is_in_a_cycle() -> None:
    """``static_order`` raises ``CycleError`` with a cycle."""
    assert set(TopologicalSorter(GRAPH).static_order()) == set(FILES)


def test_rooms_import_from_those_before_them() -> None:
    """And not from outside the rooms, whose modules may only re-export names."""
    wrong = []
    for module, targets in GRAPH.items():
        if own := room(module):
            for target in targets:
                theirs = room(target)
                if target.partition(".")[0] == own[0] and (theirs is None or theirs > own):
                    wrong.append(f"{module} -> {target}")
    assert wrong == []
    assert {room(module) for module in FILES} - {None} == {
        (package, place) for package, names in ORDER.items() for place in range(len(names))
    }


def test_the_readers_tree_has_every_folder_in_its_order() -> None:
    """CONTRIBUTING.md has one line for each, README.md a list in the last column. A folder with
    rooms of its own only (``ops``) is where the highest of them is."""
    whole, short = ((ROOT / name).read_text() for name in ("CONTRIBUTING.md", "README.md"))
    column = len("study/      studies, on Ray and MLflow   ")
    for package in MAY_IMPORT:
        rooms = reversed(ORDER[package])
        tops = [
            top if top not in ORDER[package] else name
            for name in rooms
            for top in [name.partition(".")[0]]
        ]
        folders = [name for name in dict.fromkeys(tops) if (ROOT / package / name).is_dir()]
        lines = whole.partition(f"\n{package}/ ")[2].partition("\n```")[0].splitlines()[1:]
        inner = "\n".join(itertools.takewhile(lambda line: line.startswith("  "), lines))
        assert re.findall(r"(\w+)/", inner) == folders
        first, *others = short.partition(f"\n{package}/ ")[2].splitlines()
        more = itertools.takewhile(lambda line: line.startswith(" " * column), others)
        rows = [f"{package}/ {first}", *more]
        assert " ".join(row[column:] for row in rows).split() == folders


def test_files_functions_and_folders_are_small() -> None:
    scripts, tests = ((ROOT / folder).rglob("*.py") for folder in ("scripts", "tests"))
    rooms = [*FILES.values(), *tests]
    files = [*rooms, *scripts]
    assert [path for path in files if len(path.read_text().splitlines()) > FILE] == []
    folders = Counter(path.parent for path in rooms if path.name != "__init__.py")
    assert [str(folder) for folder, count in folders.items() if count > FOLDER] == []
    long = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= FUNCTION
    }
    assert long == LONGER


def test_lines_are_narrow() -> None:
    """Code in every language, including comments for tools; for pages see ``test_docs``."""
    found = [*ROOT.iterdir()] + [
        path
        for folder in (*MAY_IMPORT, "conf", "docs", "scripts", "tests")
        for path in (ROOT / folder).rglob("*")
    ]
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in found
        if path.is_file() and path.suffix in CODE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LINE
    ]
    assert wide == []


def test_lns_ops_pulls_in_no_cluster_library() -> None:
    code = (
        "import sys, lns_ops; print([m for m in ('ray', 'mlflow', 'omegaconf', 'sklearn',"
        " 'matplotlib', 'pandas') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_import_leaves_torch_threads_alone() -> None:
    code = (
        "import torch; torch.set_num_threads(1); n = torch.get_num_threads(); import lns_ops;"
        " print(n == torch.get_num_threads())"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "True"
    )


@pytest.mark.parametrize(
    "precision", ["", "precision=PrecisionConfig(format='lns12', kahan_sum=True)"]
)
def test_a_trial_loads_neither_torchs_compiler_nor_scikit_learn(precision: str) -> None:
    """Otherwise every process of a study would need seconds before its first step."""
    code = (
        "import sys; from trainers.config import *; from trainers.training.trainer import"
        " Training; training = Training(TrialConfig(data=DataConfig(name='digits',"
        f" train_size=256), epochs=1, {precision})); training.train_epoch(); training.test();"
        " print([m for m in ('torch._dynamo', 'sklearn', 'ray', 'pandas') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
