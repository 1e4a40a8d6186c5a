"""``lns-study launch --to slurm`` on a real Slurm with one and two nodes, each a separate host:
notices, preemption, requeuing and cancelling do not change results or weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from study.ledger.log import read_ledger
from tests.study.conftest import raw_lines
from tests.study.ops.launch.machines.hosts import (
    EPOCHS,
    ROOT,
    SLURM,
    TWO_NODES,
    assert_same_results,
    hosts,
    run_on_hosts,
    slurm,
    undisturbed,
    weights,
)

__all__ = ["hosts", "slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BEGIN = f"""\
launch() {{
    python -m study launch study.yaml --to slurm --template slurm.sh storage=$PWD/studies \\
        tracking_uri=none {EPOCHS} >>launch.log 2>&1
}}
job() {{ squeue --noheader --partition=all --format="$1"; }}
requeued() {{
    until job %T | grep -q PENDING; do sleep 0.2; kill -0 $launched; done
    sleep 3  # a job that starts in the second in which it was queued again has no credential
    scontrol update JobId=$(job %i) StartTime=now
}}
launch & launched=$!
trap 'cat launch.log .lns-study/*/*.log >&2' ERR
reports() {{ grep -s '"report"' studies/tiny/ledger.jsonl | wc -l; }}
until [ $(reports) -ge 5 ]; do sleep 0.2; kill -0 $launched; done
stat --format=%a .lns-study/*/token-* >mode
python -m study status tiny --storage studies >running
"""
END = """
wait $launched
scontrol show job >jobs
python -m study report tiny --storage studies >report
"""
DISTURBANCES = {
    "notice": 'scancel --batch --signal=USR1 "$(job %i)"; requeued',
    "requeue": 'scontrol requeue "$(job %i)"; requeued',
    "preemption": "sbatch --partition=urgent --nodes=2 --exclusive --wrap='sleep 1'; requeued",
    "grace": "sbatch --partition=urgent --nodes=2 --exclusive --wrap='sleep 1'; requeued",
    "ended": "python -m study stop --now tiny --storage studies; wait $launched; launch &"
    " launched=$!",
    "cancelled": 'scancel "$(job %i)"; wait $launched && exit 1; launch & launched=$!',
}
GRACE = {"grace": {"GRACE": "60"}}
"""Slurm's own setting: seconds from a preemption's signal to the end."""
IN_ORDER = {"notice": ["interrupted"], "ended": ["stopped"]}
"""How the study ends first if there is time."""


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "work", TWO_NODES, EPOCHS)


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_a_study_on_two_nodes_ends_as_if_undisturbed(
    slurm: Path, wanted: Path, disturbance: str
) -> None:
    work = slurm / "work"
    (work / "study.yaml").write_text(TWO_NODES)
    template = (ROOT / "conf" / "cluster" / "slurm.sh").read_text()
    (work / "slurm.sh").write_text(template.replace("--nodes=1", "--nodes=2"))
    steps = BEGIN + DISTURBANCES[disturbance] + END
    run_on_hosts(
        slurm,
        *SLURM,
        "bash",
        "-eEc",
        steps,
        count=2,
        NODE_CPUS="1",
        timeout=600,
        **GRACE.get(disturbance, {}),
    )
    events = read_ledger(work / "studies" / "tiny")
    assert_same_results(raw_lines(work / "studies" / "tiny"), wanted)
    assert weights(work / "studies" / "tiny") == weights(wanted)
    outcomes = [event["outcome"] for event in events if event["event"] == "ended"]
    assert outcomes == [*IN_ORDER.get(disturbance, []), "finished"]
    assert "JobState=COMPLETED" in (work / "jobs").read_text()
    assert (work / "mode").read_text() == "600\n"
    assert re.search(r"\brunning +\d+/40\b", (work / "running").read_text())
    assert "studies/tiny/report/report.html" in (work / "report").read_text()
    assert list(work.glob(".lns-study/*/token-*")) == []
