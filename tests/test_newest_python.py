"""The newest Python on this machine, which may not have torch yet: the parts that do not need torch
work there, so problems with a new version show before its torch is released."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/lns_ops/spec/test_gaussian_log.py",
    "tests/study/config/test_compose.py",
    "tests/study/config/test_keys.py",
    "tests/study/ledger/test_log.py",
    *(f"tests/study/results/test_{name}.py" for name in ("answer", "budgets", "summary")),
)
# plans a search, whose check of optimizers imports torch
NEEDS_TORCH = (
    "tests/study/results/test_answer.py"
    "::test_a_search_that_confirms_is_given_more_seeds_to_confirm_with"
)
PACKAGES = (
    "numpy", "scipy", "mpmath", "omegaconf", "optuna", "psutil", "rich", "jinja2", "matplotlib",
    "scikit-learn", "safetensors", "hypothesis", "pytest", "pytest-timeout",
)  # fmt: skip


def newest() -> tuple[int, str]:
    """Return the minor version and the path of the newest Python 3 here."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/*/bin")
    folders = [*os.environ["PATH"].split(os.pathsep), *map(str, pyenv)]
    found = {(sys.version_info.minor, sys.executable)}
    for folder in folders:
        for path in Path(folder).glob("python3.*"):
            minor = re.fullmatch(r"python3\.(\d+)", path.name)
            works = minor and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0
            if minor and works:
                found.add((int(minor[1]), str(path)))
    return max(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_needs_no_torch_works_on_the_newest_python(tmp_path: Path) -> None:
    minor, python = newest()
    if minor == sys.version_info.minor:
        pytest.skip("no newer Python is installed")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    own = tmp_path / "venv" / "bin" / "python"
    install = [own, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    done = subprocess.run([*install, *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no newer Python is installed whose packages are to be had: {done.stderr}")
    words = [own, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
    words += ["--deselect", NEEDS_TORCH, *TESTS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
