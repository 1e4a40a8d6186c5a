"""Command line of the study engine's benchmark, JSON output of all benchmarks, and the figures of
the pages of memory and of the atlas."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lns_ops.formats import parse
from study.ledger.log import read_ledger

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


@pytest.fixture
def atlas(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("format_atlas")


def test_the_atlas_has_the_tables_of_its_trials(atlas: Any) -> None:
    found, page = atlas.read_trials(), atlas.PAGE.read_text()
    for make in (atlas.differences, atlas.rates, atlas.costs):
        assert make(found) in page


def made_up(**losses: dict[int, float]) -> list[dict[str, str]]:
    """Return trials of a task; ``float32_false_1`` is a format, its rounding and a rate, with the
    test loss by seed. The validation loss is the distance of the rate from 1."""
    rows = []
    for name, by_seed in losses.items():
        number_format, kahan, rate = name.split("_")
        for seed, loss in by_seed.items():
            rows.append({
                "task": "t", "format": number_format, "kahan": kahan, "lr": rate,
                "seed": str(seed), "status": "finished",
                "validation_loss": str(abs(float(rate) - 1)), "test_loss": str(loss),
            })  # fmt: skip
    return rows


def test_the_atlas_compares_the_same_seeds_at_the_best_rate_by_validation(
    atlas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atlas, "ALIKE", (("float32", False),))
    found = atlas.Atlas([
        *made_up(
            float32_false_1={0: 1.0, 1: 2.0, 2: 3.0},  # deviation 1
            float32_false_2={0: 0.0, 1: 0.0, 2: 0.0},  # lower on the test set alone
            int8_false_1={0: 1.5, 1: 3.5},
            int8_false_2={0: 9.0, 1: 9.0},
        ),
        {**made_up(int8_false_1={2: 99.0})[0], "status": "running"},
    ])  # fmt: skip
    assert found.unit("t") == pytest.approx(1.0)
    assert found.best("t", "float32", False).rate == 1.0
    difference, half, seeds = found.cell("t", "int8", False)
    assert (difference, seeds) == (pytest.approx(1.0), 2)  # of 0.5 and 1.5
    assert half == pytest.approx(12.706 * 0.5, rel=1e-4)  # t(0.975, 1) times the standard error
    assert found.worst("int8", False) == pytest.approx(1.0)


def test_the_atlas_takes_its_trials_from_a_ledger(atlas: Any) -> None:
    rows = atlas.trials(read_ledger(ROOT / "tests" / "golden" / "studies" / "golden"))
    assert [tuple(row) for row in rows] == [atlas.COLUMNS] * len(rows)
    assert {row["status"] for row in rows} == {"finished"}
    assert all(float(row["test_loss"]) > 0 and float(row["seconds"]) > 0 for row in rows)


def test_the_atlas_says_how_its_trials_ran(atlas: Any) -> None:
    events = read_ledger(ROOT / "tests" / "golden" / "studies" / "golden")
    lines = atlas.run(events, "0123abcd").splitlines()
    assert lines[0].endswith("2 of 2 trials.")
    assert lines[-1] == "- Ledger: SHA-256 `0123abcd`."


def test_the_atlas_draws_every_cell_and_every_point_with_a_cost(atlas: Any) -> None:
    found = atlas.read_trials()
    heat = [len(axes.texts) for axes in atlas.heat_map(found).axes]
    assert heat == [len(found.formats) * len(found.tasks)] * 2
    bits, energy = ({text.get_text() for text in axes.texts} for axes in atlas.fronts(found).axes)
    assert {name.partition(" ")[0] for name in bits} == set(found.formats)
    assert "posit(16)" in bits - energy
    assert "int8/channel" in energy
    points = [len(line.get_xdata()) for line in atlas.worth(found).axes[0].lines]
    assert points[: len(found.rates)] == [len(found.formats)] * len(found.rates)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("bfloat16", 7), ("float8_e5m2", 2), ("posit(12)", 6), ("takum_log(12)", 5), ("nvfp4", 1)],
)
def test_the_atlas_counts_a_small_weights_bits(atlas: Any, name: str, bits: int) -> None:
    assert atlas.mantissa_bits(name) == pytest.approx(bits, abs=0.05)


@pytest.mark.parametrize(("name", "kept"), [("int8/channel", 0.36), ("mxint8", 0.0)])
def test_a_moving_grid_keeps_updates_below_half_a_step(name: str, kept: float) -> None:
    """The atlas explains with it why int8 trains where mxint8 does not."""
    random, fmt, update = torch.Generator().manual_seed(0), parse(name), 0.00045
    weights = fmt.quantize((2 * torch.rand(256, 64, generator=random) - 1) / 8)
    up = torch.sign(torch.randn(256, 64, generator=random))
    moved = weights
    for _ in range(200):
        moved = fmt.quantize(moved + update * up)
    share = ((moved - weights) * up).mean().item() / (200 * update)
    assert share == pytest.approx(kept, abs=0.02)
