"""Which tests run when: shares of the slow tier by commits, and tests that are only skipped for
known reasons."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import turn_of

ROOT = Path(__file__).parents[1]
SIX = "import pytest\n\n@pytest.mark.parametrize('n', range(6))\ndef test_it(n):\n    pass\n"


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with three commits, the settings of all tests, and six tests."""
    folder = tmp_path / "checkout"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (folder / "tests" / "test_six.py").write_text(SIX)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    for n in range(3):
        git(folder, "commit", "-q", "--allow-empty", "-m", f"commit {n}")
    return folder


def run(folder: Path, *words: str) -> str:
    """Return pytest's output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_a_shares_turn_is_the_number_of_commits(checkout: Path, tmp_path: Path) -> None:
    assert turn_of(checkout) == 3
    today = int(time.time() // 86400)
    git(tmp_path, "clone", "-q", "--depth", "1", checkout.as_uri(), "shallow")
    assert turn_of(tmp_path / "shallow") - today in (0, 1)
    assert turn_of(tmp_path) - today in (0, 1)


@pytest.mark.slow
def test_every_commit_has_another_share_and_all_shares_make_the_whole(checkout: Path) -> None:
    ran = []
    for n in range(4):
        said = run(checkout, "--share=4")
        ran.append({k for k in range(6) if f"PASSED tests/test_six.py::test_it[{k}]" in said})
        git(checkout, "commit", "-q", "--allow-empty", "-m", f"next {n}")
    assert ran == [{3}, {0, 4}, {1, 5}, {2}]
    assert "PASSED tests/test_six.py::test_it[2]" in run(checkout, "--share=2/4")


def test_a_test_is_left_out_for_a_listed_reason_alone(checkout: Path) -> None:
    (checkout / "tests" / "test_skips.py").write_text(
        "import pytest\n\ndef test_listed():\n    pytest.skip('torchao is not installed')\n\n"
        "def test_unlisted():\n    pytest.skip('I am lazy')\n"
    )
    (checkout / "tests" / "test_file.py").write_text(
        "import pytest\npytest.skip('not today', allow_module_level=True)\n"
    )
    said = run(checkout, "tests/test_skips.py")
    assert "1 failed, 1 skipped" in said
    assert "FAILED tests/test_skips.py::test_unlisted" in said
    assert "not in tests/conftest.py: Skipped: I am lazy" in said
    assert "ERROR tests/test_file.py" in run(checkout)
