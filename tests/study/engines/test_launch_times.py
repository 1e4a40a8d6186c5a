"""Times of a launch in the ledger of the launched study."""

from __future__ import annotations

from study.engines.launch_times import continued, launch_stages
from study.ledger.slots import Run, follow


def launched(times: dict[str, float], *before: float) -> Run:
    """The run of a job whose plan was made at 20, after runs with earlier plans."""
    runs: list[Run] = []
    for planned in before:
        follow(runs, {"event": "planned", "time": planned, "trials": []})
    follow(runs, {"event": "planned", "time": 20.0, "trials": [], "launch": times})
    return runs[-1]


def test_the_way_of_a_launched_study_to_its_plan_by_stage() -> None:
    times = {"packing": 1.5, "submitted": 10.0, "started": 14.0, "loaded": 17.0}
    whole = (
        "packed in 1.5 s, submitted; 4.0 s until the job started, 3.0 s until its code was loaded,"
        " 3.0 s until the study was planned"
    )
    again = (
        "the job was started again; 3.0 s until its code was loaded, 3.0 s until the study was"
        " planned"
    )
    assert launch_stages(launched(times)) == whole
    assert launch_stages(launched(times, 5.0)) == whole  # an earlier launch
    assert launch_stages(launched(times, 5.0, 12.0)) == again  # queued again: it ran in between
    assert launch_stages(launched(times | {"submitted": 15.0})) == whole.replace(
        "4.0 s until the job started", "the job started (the two machines' clocks disagree)"
    )
    assert launch_stages(launched({})) == ""
    assert launch_stages(None) == ""


def test_a_job_continues_the_runs_that_were_broken_off_since_it_was_launched() -> None:
    runs: list[Run] = []
    for time, outcome in ((10.0, ""), (20.0, "stopped"), (30.0, ""), (40.0, "interrupted")):
        follow(runs, {"event": "planned", "time": time, "trials": []})
        if outcome:
            follow(runs, {"event": "ended", "time": time + 5.0, "outcome": outcome})
    assert [run.begin for run in continued(runs, {})] == [40.0, 30.0]
    assert [run.begin for run in continued(runs, {"submitted": 35.0})] == [40.0]
    assert continued(runs, {"submitted": 50.0}) == []  # the user's own new launch
    assert continued(runs[:2], {}) == []
    assert continued([], {}) == []
