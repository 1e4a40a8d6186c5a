"""Requirements for nodes of a Ray cluster: they get the user's files, and need the driver's
versions and installed packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY
from tests.study.raylets import (
    ROOT,
    cluster_of,
    command,
    python_path,
    raylet,
    said_until,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def head() -> Iterator[Any]:
    """A head without CPUs."""
    with cluster_of(0) as cluster:
        yield cluster


MINE = """
import pathlib

import torch
from neighbour import layers
from sklearn.datasets import load_digits


def digits(train):
    bunch = load_digits()
    x, y = torch.tensor(bunch.images).float().flatten(1), torch.tensor(bunch.target)
    x = x / float((pathlib.Path(__file__).parent / "parts" / "scale.txt").read_text())
    return (x[:300], y[:300]) if train else (x[300:400], y[300:400])


def make_net(inputs, classes):
    return layers(64, classes)
"""
NEIGHBOUR = """
from torch import nn


def layers(inputs, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
"""
MINE_STUDY = """
name: sent
trial:
  {model: {name: "mine.py:make_net"}, data: {name: "mine.py:digits"}, epochs: 2, batch_size: 30}
seeds: [0, 1, 2]
"""


@pytest.fixture
def elsewhere(head: Any, tmp_path: Path) -> Iterator[Any]:
    """A cluster with a raylet of one CPU that was started in another folder."""
    (tmp_path / "elsewhere").mkdir()
    with raylet(head, tmp_path / "elsewhere"):
        yield head


def test_a_node_that_lacks_the_users_files_trains_with_those_that_are_sent(
    elsewhere: Any, tmp_path: Path
) -> None:
    """All nodes of the test see one file system, so the files are removed once they were sent."""
    code = tmp_path / "code"
    (code / "parts").mkdir(parents=True)
    (code / "mine.py").write_text(MINE)
    (code / "neighbour.py").write_text(NEIGHBOUR)
    (code / "parts" / "scale.txt").write_text("16")
    (tmp_path / "code" / "tiny.yaml").write_text(MINE_STUDY)
    folder = tmp_path / "studies" / "sent"
    process = command(code, elsewhere.address, f"storage={tmp_path / 'studies'}")
    wait_until(process, folder, lambda events: any(each["event"] == "report" for each in events))
    code.rename(tmp_path / "gone")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    events = read_ledger(folder)
    assert [trial.status for trial in fold(events).trials] == [FINISHED] * 3
    assert len([each for each in events if each["event"] == "started"]) == 3


def other_installation(folder: Path) -> Path:
    """The Python of a virtual environment with this one's packages and a wheel of this package that
    has one more comment."""
    other = folder / "other"
    for package in ("lns_ops", "trainers", "study", "conf"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copyfile(ROOT / "lns_study.py", other / "lns_study.py")
    with (other / "trainers" / "files.py").open("a") as file:
        file.write("# another version\n")
    words = ["launch", "tiny.yaml", "--to", "slurm", "--dry-run", f"storage={folder}"]
    packed = [sys.executable, "-m", "study", *words, "tracking_uri=none"]
    env = os.environ | python_path(other)
    subprocess.run(packed, cwd=folder, env=env, check=True, stdout=subprocess.PIPE)
    venv.create(folder / "venv")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (wheel,) = folder.glob(".lns-study/*/*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("".join(f"{path}\n" for path in ours))
    return folder / "venv" / "bin" / "python"


@pytest.mark.parametrize(
    ("words", "cpus"),
    [([], 1), (["trial.workers=2", "gang=train"], 2)],
    ids=["process", "Ray Train"],
)
def test_a_node_with_another_version_is_refused_before_it_computes(
    head: Any, tmp_path: Path, words: list[str], cpus: int
) -> None:
    """First a raylet of another installation, whose package differs by a comment; later one with
    the same package. The first has more room, also for Ray Train's workers."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    python = other_installation(tmp_path)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = "from importlib import metadata; print(metadata.version('lns-study'))"
    found = subprocess.run(
        [python, "-c", asked], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert "+code." in found.stdout, found.stderr
    with raylet(head, tmp_path / "venv", python, env, cpus=4):
        process = command(tmp_path, head.address, "rows=[{label: a}]", "baseline=null", *words)
        said = said_until(process, "Refused")
        assert "lns-study code" in said, said
        assert not any(e["event"] == "started" for e in read_ledger(tmp_path / "studies" / "tiny"))
        head.add_node(num_cpus=cpus)
        rest, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + rest
    assert "Refused" not in rest
    events = read_ledger(tmp_path / "studies" / "tiny")
    assert {e["cpus"] for e in events if e["event"] == "capacity"} == {cpus}
    assert [trial.status for trial in fold(events).trials] == [FINISHED]


PACKAGE = """
from torch import nn


def make_net(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
PACKAGE_STUDY = """
name: tiny
trial: {model: {name: "mine.net:make_net"}, data: {name: digits}, epochs: 1, batch_size: 30}
"""


@pytest.mark.parametrize(
    ("theirs", "has"),
    [
        ("nothing", "mine.net:make_net missing"),
        ("another version", "mine.net:make_net code"),
        ("another torch", "torch 2.0.1"),
    ],
)
def test_a_node_that_lacks_what_trials_need_is_refused_before_it_computes(
    head: Any, theirs: str, has: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that lack the user's package, or have other code of it or another torch (by its
    metadata); later one that has what the driver has."""
    for place, comment in (("ours", ""), ("another torch", ""), ("another version", "# more\n")):
        (tmp_path / place / "mine").mkdir(parents=True)
        (tmp_path / place / "mine" / "__init__.py").touch()
        (tmp_path / place / "mine" / "net.py").write_text(PACKAGE + comment)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "another torch" / "torch-2.0.1.dist-info").mkdir()
    (tmp_path / "another torch" / "torch-2.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n"
    )
    (tmp_path / "tiny.yaml").write_text(PACKAGE_STUDY)
    theirs_env = os.environ | python_path(tmp_path / theirs)
    for name, value in python_path(tmp_path / "ours").items():
        monkeypatch.setenv(name, value)
    with raylet(head, tmp_path / theirs, env=theirs_env, cpus=2):
        process = command(tmp_path, head.address)
        said = said_until(process, "Refused")
        assert f"has {has}" in said, said
        assert "install the same there" in said
        assert f"Joining the Ray cluster at {head.address} ..." in said
        assert not any(e["event"] == "started" for e in read_ledger(tmp_path / "studies" / "tiny"))
        with raylet(head, tmp_path / "ours"):
            rest, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + rest
    assert "Refused" not in rest
    assert [trial.status for trial in fold(read_ledger(tmp_path / "studies" / "tiny")).trials] == [
        FINISHED
    ]
