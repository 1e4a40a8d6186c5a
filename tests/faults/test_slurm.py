"""A study of many trials on a real Slurm, stored in a real S3, while its parts die.

``LNS_STUDY_SLURM=1000,30,1 python -m pytest tests/faults/test_slurm.py`` has a thousand trials, one
fault every 30 seconds, and seed 1; see :mod:`tests.faults.slurm`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from study.ledger.log import FILE, read_ledger
from study.ledger.state import FINISHED, fold
from study.manage.rerun import differences
from tests.study.launch.test_slurm import NAMESPACES, NODE, folder  # noqa: F401
from trainers.checkpoint.manifest import STATE, read_state

TRIALS, SECONDS, SEED = os.environ.get("LNS_STUDY_SLURM", "40,10,0").split(",")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 30 * int(TRIALS))]
CPUS = "4"
STUDY = """
name: faults
trial:
  {data: {name: digits, validation_size: 300}, model: {hidden: [16]}, epochs: 6, batch_size: 32}
rows:
  - {label: float32, overrides: {precision.format: float32}}
  - {label: lns, overrides: {precision.format: lns12, precision.kahan_sum: true}}
seeds: """


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the study where nothing fails."""
    work = tmp_path_factory.mktemp("undisturbed")
    (work / "faults.yaml").write_text(f"{STUDY}{list(range(int(TRIALS) // 2))}\n")
    words = ["run", "faults.yaml", "--plain", "tracking_uri=none", f"cpus={CPUS}"]
    subprocess.run([sys.executable, "-m", "study", *words], cwd=work, check=True)
    return work / "studies" / "faults"


def weights(study: Path) -> dict[str, list[int | str]]:
    """Return the last epoch, and the SHA-256 of the tensors after it, of each trial."""
    found = {}
    for manifest in sorted(study.glob(f"checkpoints/*/*/{STATE}")):
        state = read_state(manifest.parent)
        found[manifest.parts[-3]] = [state["epoch"], state["sha256"]]
    return found


def test_a_study_on_slurm_and_s3_ends_as_if_undisturbed(
    folder: Path,  # noqa: F811
    undisturbed: Path,
) -> None:
    work = folder / "work"
    work.mkdir()
    (work / "faults.yaml").write_text(f"{STUDY}{list(range(int(TRIALS) // 2))}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    root = str(Path(__file__).parents[2])
    output = Path(tempfile.gettempdir()) / f"{folder.name}.log"
    words = [sys.executable, "-m", "tests.faults.slurm", SECONDS, SEED]
    with output.open("wb") as log:
        code = subprocess.run(
            [*NAMESPACES, "--mount-proc", "bash", str(NODE), str(folder), *words],
            env=os.environ | {"PATH": path, "PYTHONPATH": root, "NODE_CPUS": CPUS},
            stdout=log,
            stderr=log,
        ).returncode
    assert code == 0, f"see {output}"
    result = json.loads((work / "result.json").read_text())
    print({key: result[key] for key in ("seconds", "jobs", "faults")})
    assert sum(result["faults"].values()) > 0
    (work / "faults").mkdir()
    (work / "faults" / FILE).write_text(result["ledger"])
    state, wanted = fold(read_ledger(work / "faults")), fold(read_ledger(undisturbed))
    ours, theirs = ({trial.id: trial for trial in s.trials} for s in (state, wanted))
    assert ours.keys() == theirs.keys()
    for name, trial in ours.items():
        assert trial.status == FINISHED
        assert sorted(trial.reports) == sorted(theirs[name].reports)
        assert differences(trial, theirs[name]) == []
    assert result["weights"] == weights(undisturbed)
    events = [json.loads(line) for line in result["ledger"].splitlines()]
    finished = Counter(event["trial"] for event in events if event["event"] == "finished")
    reported = Counter((e["trial"], e["epoch"]) for e in events if e["event"] == "report")
    assert set(finished.values()) == set(reported.values()) == {1}
    output.unlink()
