"""Command line of the study engine's benchmark, JSON output of all benchmarks, and the memory
page's figures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_study")


@pytest.mark.parametrize(
    "words",
    ["slots noop --trials 5400", "--only slots noop --trials 5400", "--trials 5400 noop slots"],
)
def test_parts_are_named_with_and_without_only(bench: Any, words: str) -> None:
    options = bench.parse(words.split())
    assert (options.names, options.trials) == (["slots", "noop"], 5400)


def test_without_names_all_run_but_those_that_take_long(bench: Any) -> None:
    assert set(bench.PARTS) - set(bench.parse([]).names) == {"house", "raylets"}


@pytest.mark.parametrize("words", [["solts"], ["--only", "solts"]])
def test_a_part_that_there_is_not_is_refused(
    bench: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse(words)
    assert "'solts': not one of slots noop tracked" in capsys.readouterr().err


def test_every_benchmark_writes_json() -> None:
    texts = {path.name: path.read_text() for path in SCRIPTS.glob("bench_*.py")}
    run = {name for name, text in texts.items() if "__main__" in text}
    assert len(run) >= 11
    assert {name for name in run if '"--json"' not in texts[name]} == set()


def test_the_page_of_memory_has_what_a_step_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    memory = importlib.import_module("bench_memory")
    kept = json.loads((ROOT / "docs" / "benchmarks" / "data" / "memory.json").read_text())
    assert memory.measure_all(128) == kept
    assert memory.table(kept, 128) in (ROOT / "docs" / "benchmarks" / "training.md").read_text()
