"""``lns-study launch --to slurm`` on a real Slurm of one node, in namespaces of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NODE = Path(__file__).with_name("slurm_node.sh")
NAMESPACES = ("unshare", "--pid", "--mount", "--net", "--uts", "--fork", "--kill-child")
STEER = """\
python -m study launch tiny.yaml --to slurm storage=$PWD/studies tracking_uri=none \
    trial.epochs=40 &
launched=$!
until grep -qs '"report"' studies/tiny/ledger.jsonl; do sleep 0.2; kill -0 $launched; done
job=$(squeue --noheader --format=%i)
stat --format=%a .lns-study/*/token-* >mode
scancel --batch --signal=USR1 $job
until squeue --noheader --format=%T | grep -q PENDING; do sleep 0.2; kill -0 $launched; done
scontrol update JobId=$job StartTime=now
wait $launched
scontrol show job $job >job
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a short path, for sockets."""
    if any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "sbatch", "munged")):
        pytest.skip("Slurm is not installed")
    allowed = subprocess.run([*NAMESPACES, "--mount-proc", "true"], capture_output=True)
    if allowed.returncode:
        pytest.skip("a network namespace of our own is not permitted here")
    found = Path(tempfile.mkdtemp(prefix="lns-slurm-"))
    yield found
    shutil.rmtree(found)


def test_a_study_ends_in_order_at_slurms_notice_and_goes_on_when_requeued(folder: Path) -> None:
    work = folder / "work"
    work.mkdir()
    (work / "tiny.yaml").write_text(TINY)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (folder / "output").open("wb") as output:
        done = subprocess.run(
            [*NAMESPACES, "--mount-proc", "bash", str(NODE), str(folder), "bash", "-ec", STEER],
            env=os.environ | {"PATH": path},
            stdout=output,
            stderr=output,
            timeout=500,
        )
    printed = (folder / "output").read_text()
    assert done.returncode == 0, printed
    events = read_ledger(work / "studies" / "tiny")
    state = fold(events)
    assert [trial.status for trial in state.trials] == [FINISHED] * 2
    assert all(sorted(trial.reports) == list(range(1, 41)) for trial in state.trials)
    assert [event["outcome"] for event in events if event["event"] == "ended"] == [
        "stopped",
        "finished",
    ]
    assert "JobState=COMPLETED" in (work / "job").read_text()
    assert "Restarts=1" in (work / "job").read_text()
    assert (work / "mode").read_text() == "600\n"
    assert list(work.glob(".lns-study/*/token-*")) == []
