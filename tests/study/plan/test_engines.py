"""What starts the workers of a trial: Ray Train for long ones, forks for short ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from study.config import StudyConfig
from study.config.compose import load
from study.engines.preflight import check_elastic
from study.plan.engine_choice import LONG, START_SECONDS, choose_gang, resources_of
from study.plan.estimate import describe_plan
from study.plan.plan import Plan, make_plan
from tests.study.conftest import TINY, made_up_events, write_ledger
from trainers.workers.resources import IN_PROCESS, OWN_LOOP, RAY_TRAIN

pytestmark = pytest.mark.unit

EPOCHS = 100
LIMIT = LONG * START_SECONDS / EPOCHS
"""Seconds per epoch from which the gang below counts as long."""


def plan_of(tmp_path: Path, *words: str) -> Plan:
    (tmp_path / "tiny.yaml").write_text(TINY)
    own = tmp_path / "own.py"
    own.write_text("def loop(context):\n    pass\n")
    base = ["rows=[{label: a}]", "baseline=null", "trial.workers=2", f"trial.epochs={EPOCHS}"]
    return make_plan(load(str(tmp_path / "tiny.yaml"), [*base, f"storage={tmp_path}", *words]))


def gang_of(plan: Plan, seconds: float | None) -> tuple[bool, str]:
    (trial,) = plan.trials[:1]
    return choose_gang(plan.study, trial, {} if seconds is None else {trial.pace: seconds})


@pytest.mark.parametrize(
    ("words", "seconds", "by_train", "why"),
    [
        (["engine=ray"], None, True, "unknown duration"),
        (["address=auto"], LIMIT, True, "trains for about 2 min"),
        (["engine=ray"], 0.99 * LIMIT, False, "trains for about 2 min, less than 10 times the"),
        (["engine=ray", "gang=train"], 0.01, True, "gang=train"),
        (["gang=train"], None, True, "gang=train"),
        (["engine=ray", "gang=forked"], None, False, "gang=forked"),
        ([], None, False, "no Ray on this machine"),
        (["engine=ray", "trial.min_workers=1"], 0.01, True, "trial.min_workers"),
        (["trial.sync.name=asynchronous"], None, False, "parameter server"),
        (["engine=ray", "storage=s3://bucket/x"], None, False, "object store"),
        (["engine=ray", "trial.workers=1"], None, False, "one worker"),
    ],
)
def test_long_gangs_are_ray_trains(
    tmp_path: Path, words: list[str], seconds: float | None, by_train: bool, why: str
) -> None:
    plan = plan_of(tmp_path, *words)
    found = gang_of(plan, seconds)
    assert found[0] == by_train
    assert why in found[1]
    (trial,) = plan.trials[:1]
    known = {} if seconds is None else {trial.pace: seconds}
    shape = resources_of(plan.study, trial, known)
    assert shape.executor == (RAY_TRAIN if by_train else IN_PROCESS)
    assert shape.processes == (1 if by_train else trial.config.workers)
    assert shape.cpus == trial.config.workers


def test_a_gang_of_the_users_loop_is_forked(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "engine=ray", f"trial.trainable.name={tmp_path}/own.py:loop")
    assert gang_of(plan, None) == (False, "a loop of your own trains it")
    assert resources_of(plan.study, plan.trials[0], {}).executor == OWN_LOOP


def test_a_plan_says_what_starts_a_gang_by_what_earlier_ones_took(tmp_path: Path) -> None:
    def processes(study: StudyConfig) -> list[str]:
        return [line for line in describe_plan(make_plan(study)) if line.startswith("Processes")]

    study = plan_of(tmp_path, "engine=ray", "trial.epochs=3").study
    words = "Processes: 1 trial: a gang of 2 each, a process a worker (trial.workers)"
    assert processes(study) == [f"{words}, started by Ray Train: unknown duration"]
    write_ledger(study, made_up_events(study))
    (line,) = processes(study)
    assert line.startswith(f"{words}, forked: trains for about ")


def test_the_old_name_is_read_in_ledgers_and_refused_from_users(tmp_path: Path) -> None:
    study = plan_of(tmp_path).study
    old: dict[str, Any] = study.to_dict() | {"executor": "train"}
    del old["gang"]
    again = StudyConfig.from_dict(old)
    assert (again.executor, again.gang) == ("auto", "train")
    for refused in (
        lambda: plan_of(tmp_path, "executor=train"),
        lambda: StudyConfig(executor="train"),
    ):
        with pytest.raises(ValueError, match=r"executor=train: .*; use gang=train"):
            refused()


def test_forked_workers_cannot_change_in_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"min_workers=1: .*; use gang=train"):
        check_elastic(plan_of(tmp_path, "engine=ray", "gang=forked", "trial.min_workers=1"))
