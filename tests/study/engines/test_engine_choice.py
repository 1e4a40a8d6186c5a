"""Which engine runs a study: Ray Tune if the study needs or names it, otherwise this machine's
processes."""

from __future__ import annotations

import pytest

from study.config import RowConfig, StudyConfig
from study.engines.preflight import check_engine
from study.plan.engine_choice import by_ray
from trainers.config import SyncConfig, TrialConfig

NEEDS = {
    "address='auto'": StudyConfig(address="auto"),
    "gang=train": StudyConfig(gang="train"),
    "trial.sync.name=asynchronous": StudyConfig(
        trial=TrialConfig(workers=2, sync=SyncConfig(name="asynchronous"))
    ),
    "rows": StudyConfig(
        rows=[RowConfig(label="a", overrides={"workers": 2, "sync.name": "asynchronous"})]
    ),
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_needs_ray_is_ray_tunes_and_refused_by_the_local_engine(name: str) -> None:
    study = NEEDS[name]
    assert by_ray(study)
    check_engine(study)
    local = StudyConfig.from_dict(study.to_dict() | {"engine": "local"})
    setting = "trial.sync.name=asynchronous" if name == "rows" else name
    with pytest.raises(ValueError, match=f"engine=local with {setting}: .*; use engine=auto, or"):
        check_engine(local)


@pytest.mark.parametrize(("engine", "ray"), [("auto", False), ("local", False), ("ray", True)])
def test_what_needs_no_ray_is_this_machines_unless_asked(engine: str, ray: bool) -> None:
    study = StudyConfig(engine=engine)
    check_engine(study)
    assert by_ray(study) is ray
