"""The study of number formats: every format with every update on both networks, ranked in the
report by error, bits and time."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lns_ops.formats import parse
from study.config.compose import load
from study.ledger.state import FINISHED
from study.lifecycle import run_study
from study.plan.plan import make_plan
from study.report.write import write_report
from study.results.objectives import bits_of
from tests.study.conftest import SilentView

FORMATS = 16


def test_all_formats_and_updates_are_planned() -> None:
    plan = make_plan(load("formats", []), download=False)
    found = {
        (
            t.row,
            t.config.precision.format,
            t.config.precision.kahan_sum,
            t.config.precision.stochastic_rounding,
        )
        for t in plan.trials
    }
    assert len(found) == len(plan.trials) / 2 == 2 * (3 * FORMATS - 1)
    assert {(entry.row, "float32" in str(entry.params)) for entry in plan.excluded} == {
        ("mlp", True),
        ("cnn", True),
    }
    assert {trial.config.model.name for trial in plan.trials} == {"mlp", "cnn"}


@pytest.mark.parametrize(
    ("name", "bits"),
    [("float32", 32), ("tf32", 19), ("int8/channel", 8), ("lns12", 12), ("fixed(16,10)", 16)],
)
def test_bits_of_a_trial_are_those_of_its_format(name: str, bits: int) -> None:
    assert bits_of({"precision": {"format": name}}) == bits == parse(name).bits


@pytest.mark.parametrize(
    "name", ["posit(8)", "float(4,3)", "takum_log(8)", "bfp(8,32)", "nvfp4", "mxint8"]
)
def test_formats_with_parameters_are_config_values_and_choices(name: str) -> None:
    plan = make_plan(
        load(
            "formats",
            [
                f"trial.precision.format='{name}'",
                "data=digits",
                f"space={{precision.format: {{grid: ['{name}', bfloat16]}}}}",
            ],
        ),
        download=False,
    )
    assert {trial.config.precision.format for trial in plan.trials} == {name, "bfloat16"}


def test_bad_parameters_are_refused_before_anything_starts() -> None:
    overrides = ["trial.precision.format='posit(1)'", "data=digits"]
    with pytest.raises(ValueError, match=r"precision.format='posit\(1\)': bits=1: posit has 2"):
        make_plan(load("updates", overrides), download=False)


def test_rows_of_eight_bits_have_eight_bits() -> None:
    plan = make_plan(load("eight_bits", []), download=False)
    assert {(t.row == "float32", parse(t.config.precision.format).bits) for t in plan.trials} == {
        (True, 32),
        (False, 8),
        (False, 8.25),  # with its share of a block's power of two
    }
    assert {t.config.precision.master_format for t in plan.trials} == {None, "lns16"}


@pytest.mark.slow
def test_the_report_ranks_formats(tmp_path: Path, ray_session: None) -> None:
    formats = "{grid: [float32, bfloat16, float8_e5m2, lns8/channel]}"
    space = (
        f"space={{precision.format: {formats}, precision: {{grid: [{{kahan_sum: false}},"
        " {kahan_sum: true}]}}"
    )
    study = load(
        "formats",
        [
            "trial.epochs=4",
            "seeds=[0]",
            space,
            f"storage={tmp_path}",
            "tracking_uri=none",
            "cpus=2",
        ],
    )
    outcome = run_study(study, SilentView(), lambda line: None)
    assert all(trial.status == FINISHED for trial in outcome.state.trials)
    folder = write_report(outcome.state, tmp_path / "report")
    with (folder / "configurations.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 16
    errors = [float(line["validation/error"]) for line in lines]
    assert errors == sorted(errors)
    assert {float(line["bits"]) for line in lines} == {32.0, 16.0, 8.0}
    assert all(float(line["seconds"]) > 0 for line in lines)
    page = (folder / "report.html").read_text()
    assert page.count("lns8/channel") >= 2
