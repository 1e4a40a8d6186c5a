"""Hosts as namespaces of this machine, if wanted with Slurm (``hosts.sh``, ``slurm.sh``), and the
expected results of a study on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from study.evidence.rerun import differences
from study.ledger.log import FILE, read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY
from trainers.checkpoint.manifest import STATE, read_state

HERE = Path(__file__).parent
ROOT = HERE.parents[4]
NAMESPACES = (
    *("unshare", "--pid", "--mount", "--net", "--uts"),
    *("--fork", "--kill-child", "--mount-proc"),
)
SLURM = ("bash", str(HERE / "slurm.sh"))
EPOCHS = "trial.epochs=40"
GANG = "  - {label: gang, overrides: {precision.format: lns12, workers: 2}}\n"
TWO_NODES = TINY.replace("seeds:", f"{GANG}seeds:")
"""A study for hosts with one CPU each: the last trial uses two hosts, the others fill them."""
PROBE = "ip link add hosts type bridge && mount -t tmpfs tmpfs /mnt"


@pytest.fixture
def hosts() -> Iterator[Path]:
    """The folder that all hosts see; its path is short, for sockets. Commands run in its
    ``work``."""
    allowed = subprocess.run([*NAMESPACES, "bash", "-c", PROBE], capture_output=True)
    if allowed.returncode:
        pytest.skip("a network namespace of our own is not permitted here")
    found = Path(tempfile.mkdtemp(prefix="lns-hosts-", dir="/tmp"))
    (found / "work").mkdir()
    yield found
    shutil.rmtree(found)


@pytest.fixture
def slurm(hosts: Path) -> Path:
    """The same, on a machine that has Slurm's programs."""
    if any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "sbatch", "munged")):
        pytest.skip("Slurm is not installed")
    return hosts


def run_on_hosts(
    folder: Path, *words: str, count: int = 1, timeout: float | None = 500, **variables: str
) -> str:
    """Run a command on the first of ``count`` hosts, and return its output; after an error the
    output stays in a file beside ``folder``."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"PATH": path, "PYTHONPATH": str(ROOT), "HOSTS": str(count), **variables}
    kept = folder.with_suffix(".log")
    with kept.open("wb") as output:
        code = subprocess.run(
            [*NAMESPACES, "bash", str(HERE / "hosts.sh"), str(folder), *words],
            env=os.environ | given,
            stdout=output,
            stderr=output,
            timeout=timeout,
        ).returncode
    printed = kept.read_text(errors="replace")
    assert code == 0, f"{printed[-10_000:]}\nsee {kept}"
    kept.unlink()
    return printed


def undisturbed(work: Path, config: str, *overrides: str) -> Path:
    """Run the study here, without faults, and return its folder."""
    work.mkdir(exist_ok=True)
    (work / "study.yaml").write_text(config)
    words = ["run", "study.yaml", "--plain", "tracking_uri=none", *overrides]
    subprocess.run([sys.executable, "-m", "study", *words], cwd=work, check=True)
    (ledger,) = work.glob(f"studies/*/{FILE}")
    return ledger.parent


def weights(study: Path) -> dict[str, list[int | str]]:
    """Return each trial's last epoch, and the SHA-256 of the tensors after it."""
    found: dict[str, list[int | str]] = {}
    for places in ("checkpoints", "train"):  # Ray Train's workers write into the second
        for manifest in study.glob(f"{places}/*/*/{STATE}"):
            state = read_state(manifest.parent)
            last = [state["epoch"], state["sha256"]]
            found[manifest.parts[-3]] = max(last, found.get(manifest.parts[-3], last))
    return found


def assert_same_results(events: list[dict[str, Any]], wanted: Path) -> None:
    """Assert that a ledger has the trials, epochs and figures of the study in ``wanted``, each
    once."""
    ours, theirs = (
        {trial.id: trial for trial in fold(each).trials} for each in (events, read_ledger(wanted))
    )
    assert ours.keys() == theirs.keys()
    for name, trial in ours.items():
        assert trial.status == FINISHED
        assert sorted(trial.reports) == sorted(theirs[name].reports)
        assert differences(trial, theirs[name]) == []
    finished = Counter(event["trial"] for event in events if event["event"] == "finished")
    reported = Counter((e["trial"], e["epoch"]) for e in events if e["event"] == "report")
    assert set(finished.values()) == set(reported.values()) == {1}
