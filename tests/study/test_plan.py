"""Trial identities: stable, about content, and refused when two rows are the same work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from study.config import StudyConfig
from study.plan import make_plan, trial_id
from study.preflight import check_elastic
from trainers.config import DataConfig, PrecisionConfig, TrialConfig

Tiny = Callable[..., StudyConfig]


def test_rows_times_seeds_seeds_slowest(tiny: Tiny) -> None:
    plan = make_plan(tiny("plan", "seeds=[0,1]"))
    assert [(trial.seed, trial.row) for trial in plan.trials] == [
        (0, "float32"),
        (0, "lns matmul"),
        (1, "float32"),
        (1, "lns matmul"),
    ]
    assert all(trial.config.seed == trial.seed for trial in plan.trials)


def test_more_seeds_keep_the_ids_there_were(tiny: Tiny) -> None:
    few, many = make_plan(tiny("plan")), make_plan(tiny("plan", "seeds=[0,1,2]"))
    assert {trial.id for trial in few.trials} < {trial.id for trial in many.trials}
    assert few.key != many.key
    assert make_plan(tiny("plan")).key == few.key


def test_the_id_ignores_the_folder_of_the_data_and_nothing_else() -> None:
    base = TrialConfig(data=DataConfig(name="mnist", root="/a"))
    assert trial_id(base) == trial_id(dataclasses.replace(base, data=DataConfig(name="mnist", root="/b")))
    others = [dataclasses.replace(base, **change) for change in ({"seed": 1}, {"epochs": 1}, {"workers": 2}, {"threads": 2})]
    assert len({trial_id(config) for config in [base, *others]}) == 5


def test_the_id_is_pinned() -> None:
    """Changing how ids are made would make every finished study run again."""
    config = TrialConfig(data=DataConfig(name="digits", validation_size=300))
    assert trial_id(config) == trial_id(TrialConfig.from_dict(config.to_dict())) == "3f8d88803dfd"
    lns = dataclasses.replace(config, precision=PrecisionConfig(format="lns12", kahan_sum=True), seed=3)
    assert trial_id(lns) == "c07f3e0f13e6"


def test_only_ray_train_changes_the_number_of_workers(tiny: Tiny) -> None:
    elastic = ("trial.workers=2", "trial.min_workers=1")
    check_elastic(make_plan(tiny("plan", *elastic, "executor=train")))
    with pytest.raises(ValueError, match=r"row 'float32': min_workers=1: .*; use executor=train"):
        check_elastic(make_plan(tiny("plan", *elastic)))


def test_twins_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="same trial"):
        make_plan(tiny("plan", "rows=[{label: a}, {label: b}]", "baseline=null"))


def test_a_row_with_an_impossible_format_names_the_row(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=r"row 'bad'.*lns99"):
        make_plan(tiny("plan", "rows=[{label: bad, overrides: {precision.format: lns99}}]", "baseline=null"))


def test_a_study_without_rows_is_one_row(tiny: Tiny) -> None:
    plan = make_plan(tiny("plan", "rows=[]", "baseline=null"))
    assert [trial.row for trial in plan.trials] == ["plan"]


@pytest.mark.parametrize("override", ["trial.seed=7", "rows=[{label: a, overrides: {seed: 7}}]"])
def test_a_seed_where_it_would_be_ignored_is_refused(tiny: Tiny, override: str) -> None:
    with pytest.raises(ValueError, match=r"seed=7: .*use seeds=\[7\]"):
        make_plan(tiny("plan", override, "baseline=null"))
