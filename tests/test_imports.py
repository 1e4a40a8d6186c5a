"""The architecture as a test: study -> trainers -> lns_ops and never back, and each big library in one package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {"lns_ops": {"lns_ops"}, "trainers": {"trainers", "lns_ops"}, "study": {"study", "trainers", "lns_ops"}}
OWNERS = {"mlflow": {"study"}, "omegaconf": {"study"}, "ray": {"study", "trainers"}}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


SOURCES = [(package, path) for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize(("package", "path"), SOURCES, ids=[str(p.relative_to(ROOT)) for _, p in SOURCES])
def test_import_direction(package: str, path: Path) -> None:
    tops = {name.split(".")[0] for name in imports_of(path)}
    assert tops & set(MAY_IMPORT) <= MAY_IMPORT[package]
    assert all(package in owners for library, owners in OWNERS.items() if library in tops)


@pytest.mark.parametrize("path", [p for _, p in SOURCES if _ == "trainers"], ids=lambda p: p.name)
def test_trainers_leave_tune_to_study(path: Path) -> None:
    assert not any(name.startswith("ray.tune") for name in imports_of(path))


@pytest.mark.parametrize("path", [p for _, p in SOURCES if _ == "study"], ids=lambda p: p.name)
def test_study_leaves_train_to_trainers(path: Path) -> None:
    assert not any(name.startswith("ray.train.torch") for name in imports_of(path))


def test_lns_ops_pulls_in_no_cluster_library() -> None:
    code = "import sys, lns_ops; print([m for m in ('ray', 'mlflow', 'omegaconf', 'sklearn', 'matplotlib', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_import_leaves_torch_threads_alone() -> None:
    code = (
        "import torch; torch.set_num_threads(1); n = torch.get_num_threads(); import lns_ops; print(n == torch.get_num_threads())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"


@pytest.mark.parametrize("precision", ["", "precision=PrecisionConfig(format='lns12', kahan_sum=True)"])
def test_a_trial_loads_neither_torchs_compiler_nor_scikit_learn(precision: str) -> None:
    """Seconds that every process of a study would need before its first step."""
    code = (
        "import sys; from trainers.config import *; from trainers.training.trainer import Training; "
        f"training = Training(TrialConfig(data=DataConfig(name='digits', train_size=256), epochs=1, {precision})); "
        "training.train_epoch(); training.test(); print([m for m in ('torch._dynamo', 'sklearn', 'ray', 'pandas') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
