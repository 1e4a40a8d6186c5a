"""The start of the ray engine: in parallel with the check of trials, and only for studies with
trials to run."""

from __future__ import annotations

import threading
import time

import pytest
import ray
from ray.util import list_named_actors, placement_group, remove_placement_group

from study._compat import cluster_use
from study.engines.preflight import _beside
from study.errors import UserError
from study.ledger.log import FILE
from study.ledger.state import FINISHED
from study.lifecycle import run_study
from tests.study.conftest import SilentView
from tests.study.engines.conftest import Tiny

STARTING = "Starting Ray on this machine ..."


def test_both_run_at_once_and_the_error_of_either_is_raised() -> None:
    begun, met = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        assert met.wait(10)
        return 3

    def meanwhile() -> None:
        assert begun.wait(10)
        met.set()

    assert _beside(work, meanwhile) == 3

    def fail() -> int:
        raise ValueError("of the work")

    def lose() -> None:
        raise UserError("no Ray")

    with pytest.raises(ValueError, match="of the work"):
        _beside(fail, lambda: None)
    with pytest.raises(UserError, match="no Ray"):
        _beside(lambda: 3, lose)


@pytest.mark.slow
def test_a_new_study_starts_ray_while_its_trials_are_checked(tiny: Tiny, ray_session: None) -> None:
    said: list[str] = []
    study = tiny("start", "engine=ray", "seeds=[0]")
    outcome = run_study(study, SilentView(), said.append)
    assert [trial.status for trial in outcome.state.trials] == [FINISHED] * len(study.rows)
    (data,) = (line for line in said if line.startswith("Data: "))
    assert said.index(STARTING) < said.index(data)
    said.clear()
    run_study(study, SilentView(), said.append)
    assert STARTING not in said  # nothing is left to run


@pytest.mark.slow
def test_what_is_ours_and_what_is_free_is_told_by_ray_at_once(ray_session: None) -> None:
    """Another user's CPUs are the remaining ones; all names are Ray's own."""
    (free, _, _, before) = cluster_use()
    group = placement_group([{"CPU": 1}, {"CPU": 0.5}])
    ray.get(group.ready())
    try:
        while (now := cluster_use())[3] == before:
            time.sleep(0.05)
        assert now[3] == (before[0] + 1.5, 0.0)
        assert sum(cpus for cpus, _ in now[0].values()) == sum(c for c, _ in free.values()) - 1.5
    finally:
        remove_placement_group(group)


@pytest.mark.slow
def test_hosts_end_with_a_study_that_cannot_start(tiny: Tiny, ray_session: None) -> None:
    said: list[str] = []
    study = tiny("refused", "engine=ray", "trial.data.validation_size=100000")
    with pytest.raises(UserError, match="validation_size"):
        run_study(study, SilentView(), said.append)
    assert STARTING in said
    assert not any("lns-study" in str(name) for name in list_named_actors(all_namespaces=True))
    assert not (study.folder / FILE).exists()
