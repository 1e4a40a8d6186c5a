"""A regression from end to end: a search by R2 (higher is better), its report, MLflow and
status."""

from __future__ import annotations

import html
import io
from pathlib import Path

import pytest
from PIL import Image

from study.cli import main
from study.config.compose import load
from study.ledger.state import FINISHED
from study.lifecycle import Outcome, run_study
from study.results.answer import answer
from study.results.configurations import best, configurations
from study.results.summary import summarise
from tests.study.conftest import SilentView
from tests.study.tracking.conftest import is_equal, runs_of

TASK = """
import torch


def curve(train):
    generator = torch.Generator().manual_seed(int(train))
    x = torch.randn(200 if train else 60, 3, generator=generator)
    return x, torch.sin(x @ torch.tensor([0.5, -0.25, 1.0]))
"""
STUDY = """
name: regression
trial:
  data: {name: "task.py:curve"}
  model: {hidden: [16]}
  loss: {name: mse}
  metrics: {r2: {name: "torchmetrics:R2Score"}}
  epochs: 2
  batch_size: 20
metric: validation/r2
mode: max
baseline: float32
rows:
  - {label: float32}
  - {label: lns12, overrides: {precision.format: lns12}, worse_by: 0.5}
space: {optimizer.lr: {loguniform: [0.001, 0.1]}}
search: {num_samples: 3}
seeds: [0, 1]
cpus: 2
"""


def check_report(outcome: Outcome, shown_first: str) -> None:
    """Its page and its pictures show R2 and no error."""
    page = (outcome.report / "report.html").read_text()
    shown = page.partition("<details>")[0].partition("<body>")[2]
    assert "<h2>Test r2</h2>" in shown
    assert ">test r2</th>" in shown
    assert "best of 3, by validation/r2" in shown
    summary = summarise(outcome.state)
    assert "(Test r2, higher is better, each row at its best" in answer(outcome.state, summary)
    assert answer(outcome.state, summary) in html.unescape(page)
    assert shown_first in shown
    assert 'alt="Lines: validation r2 per epoch' in shown
    assert "test error" not in page
    assert "validation error" not in page
    for name in ("test_error", "error_per_epoch", "parallel", "budget"):
        assert Image.open(io.BytesIO((outcome.report / f"{name}.png").read_bytes())).width == 1280


@pytest.mark.slow
def test_a_regression_is_searched_and_reported_by_its_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "regression.yaml").write_text(STUDY)
    study = load(str(tmp_path / "regression.yaml"), [f"storage={tmp_path}"])
    outcome = run_study(study, SilentView(), lambda line: None)
    state = outcome.state
    assert [trial.status for trial in state.trials] == [FINISHED] * 12
    found = configurations(state.trials, ["validation/r2"])
    summary = summarise(state)
    for row in summary.rows:
        mine = [entry for entry in found if entry.row == row.label]
        values = {entry.number: entry.objectives["validation/r2"] for entry in mine}
        chosen = best(mine, study.search.objectives)
        assert chosen is not None
        assert values[chosen.number] == max(values.values())
        assert (row.trials, row.finished) == (chosen.trials, 2)
        tests = [trial.test["test/r2"] for trial in chosen.trials]
        assert row.mean == pytest.approx(sum(tests) / 2)
    base, other = summary.rows
    assert other.gap == pytest.approx((other.mean or 0) - (base.mean or 0))
    assert other.verdict == ("pass" if (other.gap or 0) <= -0.5 else "fail")
    check_report(outcome, f"{base.mean:.4g} ± ")

    assert outcome.tracking_error == ""
    assert is_equal(study)
    _, parent, children = runs_of(study)
    assert parent.data.metrics["float32/test_r2"] == pytest.approx(base.mean)
    assert parent.data.metrics["lns12/test_r2_sd"] == pytest.approx(other.sd)
    assert all("validation/r2" in run.data.metrics for run in children)

    capsys.readouterr()
    assert main(["status", "regression", "--storage", str(tmp_path)]) == 0
    highest = max(trial.metric("validation/r2")[2] for trial in state.trials)
    said = " ".join(capsys.readouterr().out.split())
    assert f"best validation/r2 {highest:.4g} (" in said
    assert "error" not in said
    assert main(["list", "--plain", "--storage", str(tmp_path)]) == 0
    assert "validation/r2 " in capsys.readouterr().out
