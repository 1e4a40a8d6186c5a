"""Contents of wheels, source distributions and editable installations, for a copy of this checkout
and for the arithmetic in it by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "conf",
    "lns_ops",
    "lns_study.py",
    "study",
    "trainers",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
BUILD = (
    "import importlib, sys; backend = importlib.import_module(sys.argv[1]); print(getattr(backend,"
    " sys.argv[2])(sys.argv[3]))"
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
    """Build with the distribution's own backend; return the file."""
    backend = tomllib.loads((checkout / "pyproject.toml").read_text())["build-system"]
    done = subprocess.run(
        [sys.executable, "-c", BUILD, backend["build-backend"], what, str(folder)],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def plan(site: Path, folder: Path) -> str:
    """Return the output of ``python -m study`` in a folder with its own ``conf``; the package is
    installed in ``site``, all else comes from this environment."""
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
    # -S: without the paths of this environment's editable installations
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
        "lns_study.py",
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


SCRIPT = """
import lns_study as study
from lns_study import StudyConfig

assert study.__name__ == "study"
assert study.StudyConfig is StudyConfig
config = StudyConfig(name="mine", tracking_uri="none")
print("made", config.name)
"""


@pytest.mark.parametrize("editable", [False, True])
def test_a_script_names_the_file_beside_it_that_has_our_name(
    checkout: Path, tmp_path: Path, editable: bool
) -> None:
    what = "build_editable" if editable else "build_wheel"
    zipfile.ZipFile(build(checkout, what, tmp_path)).extractall(tmp_path / "site")
    (folder := tmp_path / "work").mkdir()
    (folder / "script.py").write_text(SCRIPT)
    packages = sysconfig.get_paths()["purelib"]
    start = (
        f"import sys, site; sys.path[1:1] = [{packages!r}];"
        f" site.addsitedir({str(tmp_path / 'site')!r});"
        " sys.path.insert(0, '.'); import runpy; runpy.run_path('script.py', run_name='__main__')"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-S", "-c", start]
        return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)

    assert run().stdout == "made mine\n"
    for name in ("study.py", "trainers.py", "lns_ops/__init__.py"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        done = run()
        path.unlink()
        said = f"ImportError: {path.parent if '/' in name else path}: has the name of a package of"
        assert said in done.stderr, done.stderr


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


# --------------------------------------------------------------------------------------------------

NEEDED = {"torch", "numpy", "numba", "safetensors"}
STEP = """
import importlib.util, torch, lns_ops
from torch import nn
others = "ray mlflow omegaconf study trainers sklearn scipy matplotlib cupy".split()
assert [name for name in others if importlib.util.find_spec(name)] == []
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4))
lns_ops.convert_(model, "lns16", scope="everywhere")
optimizer = lns_ops.optim.Adam(model.parameters(), lr=1e-2, kahan_sum=True)
x, y = torch.randn(64, 20), torch.arange(64) % 4
for step in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    first = loss.item() if step == 0 else first
lns_ops.serialization.save_file(model.state_dict(), "model.safetensors")
print(lns_ops.__file__, first, loss.item())
"""
USER = """
import lns_ops
bits: int = lns_ops.lns12.bits
wrong: str = lns_ops.lns12.bits
"""


def site_of(folder: Path, needed: set[str] | None = None) -> Path:
    """The packages of a new environment, with links to some of this one's distributions and their
    dependencies; without names, a path to all."""
    venv.create(folder, with_pip=needed is not None)
    (site,) = folder.glob("lib/python*/site-packages")
    if needed is None:
        (site / "all.pth").write_text(sysconfig.get_paths()["purelib"])
    names = set(needed or ())
    while more := {_plain(name) for name in names for name in _requirements(name)} - names:
        names |= more
    for name in names:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:  # for another system
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                place = metadata.distribution(name).locate_file(top)
                (site / top).symlink_to(str(place))
    return site


def test_the_arithmetic_alone_is_the_same_files(checkout: Path, tmp_path: Path) -> None:
    """It needs four packages, in the versions that the studies need, except for the newest
    torch."""
    alone = zipfile.ZipFile(build(checkout / "lns_ops", "build_wheel", tmp_path))
    whole = zipfile.ZipFile(build(checkout, "build_wheel", tmp_path))
    contents = [
        {name: archive.read(name) for name in archive.namelist() if name.startswith("lns_ops/")}
        for archive in (alone, whole)
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 100
    tables = [
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for folder in (checkout / "lns_ops", checkout)
    ]
    needs = [set(table["dependencies"]) for table in tables]
    assert {re.split("[<>=]", need)[0] for need in needs[0]} == NEEDED
    assert {re.split(",?<", need)[0] for need in needs[0]} <= {
        re.split(",?<", need)[0] for need in needs[1]
    }
    for key in ("version", "requires-python"):
        assert tables[0][key] == tables[1][key]
    extras = [table["optional-dependencies"] for table in tables]
    assert extras[0].items() <= extras[1].items()
    assert extras[1]["gpu"] == extras[0]["gpu13"]


def test_a_source_distribution_of_the_arithmetic_makes_the_same_wheel(
    checkout: Path, tmp_path: Path
) -> None:
    with tarfile.open(build(checkout / "lns_ops", "build_sdist", tmp_path)) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert (
        build(source, "build_wheel", tmp_path / "source").read_bytes()
        == build(checkout / "lns_ops", "build_wheel", tmp_path).read_bytes()
    )


@pytest.mark.slow
def test_the_arithmetic_alone_trains_where_nothing_else_is(checkout: Path, tmp_path: Path) -> None:
    """pip without an index finds everything that the wheel requires."""
    wheel = build(checkout / "lns_ops", "build_wheel", tmp_path)
    site = site_of(tmp_path / "venv", NEEDED)
    python = str(tmp_path / "venv" / "bin" / "python")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [python, "-m", "pip", "--isolated", "install", "--no-index", "--quiet", str(wheel)]
    for words in (pip, [python, "-c", STEP]):
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    where, first, last = done.stdout.split()
    assert Path(where).parents[1] == site
    assert float(last) < float(first)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "lns_ops"])
def test_type_checkers_find_editable_installations(
    checkout: Path, tmp_path: Path, folder: str
) -> None:
    site = site_of(tmp_path / "venv")
    zipfile.ZipFile(build(checkout / folder, "build_editable", tmp_path)).extractall(site)
    (tmp_path / "user.py").write_text(USER)
    python = tmp_path / "venv" / "bin" / "python"
    words = [sys.executable, "-m", "mypy", "--python-executable", str(python), "user.py"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        'user.py:4: error: Incompatible types in assignment (expression has type "int", variable'
        ' has type "str")  [assignment]',
        "Found 1 error in 1 file (checked 1 source file)",
    ]


# --------------------------------------------------------------------------------------------------


def test_a_host_with_torch_2_11_may_keep_it() -> None:
    from packaging.requirements import Requirement

    (torch,) = (
        found
        for text in metadata.requires("lns-study") or []
        if (found := Requirement(text)).name == "torch"
    )
    assert torch.specifier.contains("2.11.0")


def test_all_that_is_installed_is_pinned() -> None:
    """The list includes what an extra needs and this machine lacks (CuPy). The installer (pip,
    which pip-audit requires) is the venv's."""
    pinned = {
        _plain(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    needed = {"lns-study"}
    while more := {_plain(name) for parent in needed for name in _requirements(parent)} - needed:
        needed |= more
    assert sorted(needed - pinned - {"lns-study", "pip"}) == []


def _requirements(name: str) -> list[str]:
    """Return the names of a distribution's dependencies here; for ours with all extras."""
    from packaging.requirements import Requirement

    try:
        found = [Requirement(text) for text in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:
        return []
    ours = metadata.metadata(name).get_all("Provides-Extra") if name == "lns-study" else None
    extras = ours or [""]
    return [
        each.name
        for each in found
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def _plain(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()
