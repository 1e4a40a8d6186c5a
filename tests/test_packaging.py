"""What is installed where: a wheel, a source distribution and an editable installation, of a copy
of this checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "conf",
    "lns_ops",
    "study",
    "trainers",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
BUILD = (
    "import sys; from setuptools import build_meta; print(getattr(build_meta,"
    " sys.argv[1])(sys.argv[2]))"
)
STUDIES = sorted(
    path.relative_to(ROOT / "conf").as_posix()
    for path in (ROOT / "conf").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
)
PLAN = ["run", "table", "model=mlp_128", "trial.data.name=digits", "--dry-run"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name in PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def build(checkout: Path, what: str, folder: Path) -> Path:
    """What setuptools makes; its file."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(folder)],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def plan(site: Path, folder: Path) -> str:
    """What ``python -m study`` prints in a folder with a ``conf`` of its own; installed in
    ``site``, all else from this environment."""
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "__init__.py").touch()
    (folder / "conf" / "model" / "mine.yaml").write_text("trial: {model: {hidden: [7]}}")
    packages = sysconfig.get_paths()["purelib"]
    start = (
        f"import sys; sys.path[1:1] = [{str(site)!r}, {packages!r}]; import runpy, site;"
        f" site.addsitedir({str(site)!r}); sys.argv[0] = 'study'; runpy.run_module('study',"
        " run_name='__main__')"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # -S: without the paths of what is editable in this environment
    words = [sys.executable, "-S", "-c", start, *PLAN]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_installs_no_conf_of_its_own_and_finds_its_studies(
    checkout: Path, tmp_path: Path
) -> None:
    wheel = zipfile.ZipFile(build(checkout, "build_wheel", tmp_path))
    names = wheel.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "study",
        "trainers",
        "lns_ops",
    }
    assert (
        sorted(name.removeprefix("study/conf/") for name in names if name.startswith("study/conf/"))
        == STUDIES
    )
    kernels = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "lns_ops" / "cuda" / "src").iterdir()
    }
    assert len(kernels) > 10
    assert {
        *kernels,
        "lns_ops/py.typed",
        "trainers/py.typed",
        "study/report/templates/report.html.j2",
    } <= set(names)
    wheel.extractall(tmp_path / "site")
    assert "# 12 trials:" in plan(tmp_path / "site", tmp_path / "work")


def test_an_editable_installation_finds_the_studies_of_its_checkout(
    checkout: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(build(checkout, "build_editable", tmp_path)).extractall(tmp_path / "site")
    (checkout / "conf" / "model" / "mlp_128.yaml").write_text("trial: {model: {hidden: [129]}}")
    assert "- 129" in plan(tmp_path / "site", tmp_path / "work")


def test_a_source_distribution_has_the_studies(checkout: Path, tmp_path: Path) -> None:
    with tarfile.open(build(checkout, "build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"conf/{name}" for name in STUDIES} | {"setup.py", "pyproject.toml"} <= names


def test_all_that_is_installed_is_pinned() -> None:
    """What an extra needs and this machine has not (CuPy) is in the list, too."""
    pinned = {
        _plain(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    needed = {"lns-study"}
    while more := {_plain(name) for parent in needed for name in _requirements(parent)} - needed:
        needed |= more
    assert sorted(needed - pinned - {"lns-study"}) == []


def _requirements(name: str) -> list[str]:
    """Names of what a distribution needs here, of ours with all extras."""
    from packaging.requirements import Requirement

    try:
        found = [Requirement(text) for text in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:
        return []
    extras = ["dev", "mx", "team", "gpu"] if name == "lns-study" else [""]
    return [
        each.name
        for each in found
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def _plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()
