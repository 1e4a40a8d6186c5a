"""The pinned versions of constraints.txt, checked against public lists of vulnerabilities."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def faults(dependencies: list[dict[str, Any]]) -> dict[str, str]:
    """Return vulnerabilities that a later version fixes, and versions that could not be looked up.
    Skips if none could be looked up: an unreachable database looks like an empty one."""
    unknown = {each["name"]: each["skip_reason"] for each in dependencies if "skip_reason" in each}
    if dependencies and len(unknown) == len(dependencies):
        pytest.skip(f"pip-audit cannot reach its database: it finds 0 of {len(unknown)} packages")
    return unknown | {
        f"{each['name']} {each['version']}": fault["id"]
        for each in dependencies
        for fault in each.get("vulns", [])
        if fault["fix_versions"]
    }


def test_what_could_not_be_looked_up_is_no_clean_bill() -> None:
    unknown = {"name": "a", "skip_reason": "not found on PyPI"}
    mended = {"id": "CVE-1", "fix_versions": ["2"]}
    faulty = {"name": "b", "version": "1", "vulns": [mended, {"id": "CVE-2", "fix_versions": []}]}
    with pytest.raises(pytest.skip.Exception, match="0 of 2 packages"):
        faults([unknown, unknown | {"name": "c"}])
    assert faults([unknown, faulty]) == {"a": "not found on PyPI", "b 1": "CVE-1"}


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
    assert faults(json.loads(done.stdout)["dependencies"]) == {}
