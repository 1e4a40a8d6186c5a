"""The pinned versions of constraints.txt, held against the public lists of vulnerabilities."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_no_pinned_version_has_a_known_vulnerability_that_a_later_one_mends() -> None:
    pytest.importorskip("pip_audit", reason="pip-audit is not installed")
    words = ["--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off"]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--requirement", "constraints.txt", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if not done.stdout.startswith("{"):
        pytest.skip(f"pip-audit cannot reach its database: {done.stderr.strip()[-200:]}")
    audited = [each for each in json.loads(done.stdout)["dependencies"] if "version" in each]
    if not audited:
        pytest.skip("pip-audit cannot reach its database: it found none of the packages there")
    found = {
        f"{each['name']} {each['version']}": fault["id"]
        for each in audited
        for fault in each.get("vulns", [])
        if fault["fix_versions"]
    }
    assert found == {}
