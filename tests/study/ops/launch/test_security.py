"""Every promise of SECURITY.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_every_promise_has_its_test() -> None:
    test = r"`([^`]+)::(\w+)`"
    rows = re.findall(
        rf"^\| (\d+) \|.*\| ((?:{test}(?:, )?)+) \|$", (ROOT / "SECURITY.md").read_text(), re.M
    )
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    missing = [
        f"{path}::{name}"
        for _, tests, *_ in rows
        for path, name in re.findall(test, tests)
        if name
        not in {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
    ]
    assert missing == []
