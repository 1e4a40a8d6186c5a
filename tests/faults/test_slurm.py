"""A study of many trials on a real Slurm with a real S3 storage, with fault injection.

``LNS_STUDY_SLURM=1000,30,1 python -m pytest tests/faults/test_slurm.py`` runs 1,000 trials with one
fault every 30 s and seed 1; see :mod:`tests.faults.slurm`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.study.ops.launch.machines.hosts import (
    SLURM,
    assert_same_results,
    hosts,
    run_on_hosts,
    slurm,
    undisturbed,
    weights,
)

TRIALS, SECONDS, SEED = os.environ.get("LNS_STUDY_SLURM", "40,10,0").split(",")
__all__ = ["hosts", "slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 30 * int(TRIALS))]
CPUS = "4"
STUDY = """
name: faults
trial:
  {data: {name: digits, validation_size: 300}, model: {hidden: [16]}, epochs: 6, batch_size: 32}
rows:
  - {label: float32, overrides: {precision.format: float32}}
  - {label: lns, overrides: {precision.format: lns12, precision.kahan_sum: true}}
seeds: """ + str(list(range(int(TRIALS) // 2)))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "work", STUDY, f"cpus={CPUS}")


def test_a_study_on_slurm_and_s3_ends_as_if_undisturbed(slurm: Path, wanted: Path) -> None:
    work = slurm / "work"
    (work / "faults.yaml").write_text(STUDY)
    words = [sys.executable, "-m", "tests.faults.slurm", SECONDS, SEED]
    run_on_hosts(slurm, *SLURM, *words, timeout=None, NODE_CPUS=CPUS)
    result = json.loads((work / "result.json").read_text())
    print({key: result[key] for key in ("seconds", "jobs", "faults")})
    assert sum(result["faults"].values()) > 0
    assert_same_results([json.loads(line) for line in result["ledger"].splitlines()], wanted)
    assert result["weights"] == weights(wanted)
