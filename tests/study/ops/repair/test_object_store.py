"""Commands on a study in an object store, each from a machine without its cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.study.conftest import TINY
from tests.study.object_store import BUCKET, Line, s3, s3_server  # noqa: F401
from trainers import object_store
from trainers.object_store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
URL = f"s3://{BUCKET}/studies"
CLAIM = """
claims:
  - {name: near, claim: N., source: test, difference: {rows: [lns matmul, float32], at_most: 9}}
"""
Elsewhere = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def elsewhere(s3: Line, tmp_path: Path) -> Elsewhere:  # noqa: F811
    """Run a command with an empty cache, on a study that has run."""
    (tmp_path / "tiny.yaml").write_text(TINY + CLAIM)
    machines = iter(range(100))

    def give(*words: str, to: str = URL) -> subprocess.CompletedProcess[str]:
        cache = tmp_path / f"machine {next(machines)}"
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "study",
                *words,
                *([] if words[0] == "run" else ["--storage", to]),
            ],
            cwd=tmp_path,
            env=os.environ | {object_store.CACHE: str(cache)},
            capture_output=True,
            text=True,
        )

    done = give("run", "tiny.yaml", f"storage={URL}", "tracking_uri=none", "seeds=[0,1]")
    assert done.returncode == 0, done.stderr
    return give


def test_its_report_is_written_verified_and_reproduced(elsewhere: Elsewhere) -> None:
    first = elsewhere("report", "tiny")
    assert first.returncode == 0, first.stderr
    verified = elsewhere("report", "tiny", "--verify")
    assert (verified.returncode, verified.stdout) == (
        0,
        "tiny: every figure is as computed again\n",
    )
    figures = json.loads(Store(f"{URL}/tiny").get("report/figures.json"))
    figures["rows"][0]["mean"] += 0.1
    Store(f"{URL}/tiny").put("report/figures.json", json.dumps(figures).encode())
    assert elsewhere("report", "tiny", "--verify").returncode == 1
    page = elsewhere("reproduce", "tiny.yaml", "seeds=[0,1]", "--page-only")
    assert page.returncode == 0, page.stderr
    assert {"claims.md", "tiny.png"} <= set(Store(f"{URL}/claims").names())
    assert elsewhere("list").stdout.count("finished") == 1
    assert "(there: tiny)" in elsewhere("report", "nothing").stderr


def test_its_trials_are_taken_over(elsewhere: Elsewhere) -> None:
    limited = ("storage=" + URL, "tracking_uri=none", "name=other", "limits={trials: 1}")
    assert elsewhere("run", "tiny.yaml", *limited).returncode == 3
    taken = elsewhere("import", "other", "tiny")
    assert "took 1 finished trials over; 0 are left" in taken.stdout, taken.stderr


def test_damage_is_found_and_repaired_as_the_guide_says(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    store = Store(f"{URL}/tiny")
    assert "checkpoints: 8 whole" in elsewhere("doctor", "tiny").stdout
    checkpoint = next(name for name in store.names() if name.endswith(".safetensors"))
    whole = store.get(checkpoint)
    store.put(checkpoint, b"damaged")
    third = f"ledger/{store.names('ledger')[3]}"
    store.put(third, b"damaged")
    found = elsewhere("doctor", "tiny")
    assert found.returncode == 1
    assert f"7 whole, 1 damaged ({store.url}/{Path(checkpoint).parent})" in found.stdout
    assert "BAD  ledger: line" in found.stdout
    refused = elsewhere("doctor", "tiny", "--repair")
    assert refused.returncode == 2
    assert refused.stderr.endswith("as docs/howto/repair-and-resume.md says\n")
    store.put(checkpoint, whole)

    copy = tmp_path / "mend" / "tiny"
    for name in store.names():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(store.get(name))
    segments = sorted((copy / "ledger").iterdir())
    (copy / "ledger.jsonl").write_bytes(b"".join(path.read_bytes() for path in segments))
    repaired = elsewhere("doctor", "tiny", "--repair", to=str(copy.parent))
    assert "Restored: " in repaired.stdout, repaired.stderr
    for name in store.names():
        if name.startswith(("ledger/", "locks/")):
            store.remove(name)
    store.put("ledger/0000000001.jsonl", (copy / "ledger.jsonl").read_bytes())
    assert elsewhere("doctor", "tiny").returncode == 0
    resumed = elsewhere("run", "--resume", "tiny")
    assert "4 of 4 trials are finished" in resumed.stdout, resumed.stderr
