"""TensorBoard's files and alerts, from real ledgers, with real commands."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from study.config import StudyConfig
from study.ledger.events import Event
from study.ledger.log import Ledger, read_ledger
from study.ledger.state import fold
from study.lifecycle import run_study
from study.report.write import write_report
from study.results.ties import compared
from study.tracking import tensorboard_alerts as sinks
from study.tracking.payload import documents_of
from study.tracking.tensorboard_alerts import Feed, Sinks, check_sinks
from tests.study.conftest import SilentView, made_up_events, write_ledger

Tiny = Callable[..., StudyConfig]
SAY = (
    "echo $LNS_STUDY_EVENT $LNS_STUDY_TRIAL $LNS_STUDY_VALUE$LNS_STUDY_OUTCOME"
    " >> $LNS_STUDY_FOLDER/said"
)
WAIT = 60.0
"""Maximum seconds for a process to act on a busy machine."""
needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def alerting(tiny: Tiny, name: str, *overrides: str) -> StudyConfig:
    """A study whose alerts write every event into a file."""
    kinds = ", ".join(f"{kind}: '{SAY}'" for kind in ("finished", "failed", "best"))
    return tiny(name, f"alerts={{{kinds}}}", *overrides)


def said(study: StudyConfig) -> list[list[str]]:
    path = study.folder / "said"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def with_failure(study: StudyConfig) -> tuple[list[Event], str]:
    """A made-up ledger whose last trial fails, and that trial's id."""
    events = made_up_events(study)
    last = max(place for place, event in enumerate(events) if event["event"] == "finished")
    trial = events[last]["trial"]
    failed = {"event": "failed", "trial": trial, "error": "made up", "time": events[last]["time"]}
    return [*events[:last], failed, *events[last + 1 :]], trial


def replay(ledger: Ledger, events: list[Event]) -> None:
    for event in events:
        ledger.append(
            {
                "event": event["event"],
                **{key: value for key, value in event.items() if key not in ("event", "time")},
            }
        )


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_each_event_runs_its_command_once_over_restarts(tiny: Tiny) -> None:
    study = alerting(tiny, "alerts")
    events, failed = with_failure(study)
    half = len(events) // 2
    with Ledger(study.folder) as ledger:
        replay(ledger, events[:half])
        Feed(study.folder).close()
        replay(ledger, events[half:])
    for _ in range(2):
        process = Sinks(study)
        process.start()
        process.close()
    heard = said(study)
    assert [words for words in heard if words[0] == "failed"] == [["failed", failed]]
    assert [words for words in heard if words[0] == "finished"] == [
        ["finished", events[-1]["outcome"]]
    ]
    values = [float(words[2]) for words in heard if words[0] == "best"]
    assert values
    assert values == sorted(set(values), reverse=True)
    state = fold(read_ledger(study.folder))
    finals = {}
    for trial in state.trials:
        errors = trial.metric("validation/error")
        finals[trial.id] = errors[max(errors)] if trial.status == "finished" else 1.0
    assert values[-1] == compared(min(finals.values()))


def test_what_happened_before_alerts_were_asked_for_runs_nothing(tiny: Tiny) -> None:
    plain, study = tiny("late"), alerting(tiny, "late")
    events, _ = with_failure(plain)
    again = {**events[0], "study": study.to_dict(), "time": events[-1]["time"] + 1}
    write_ledger(study, [*events, again])
    Feed(study.folder).close()
    assert said(study) == []
    ended = {"event": "ended", "outcome": "stopped", "time": again["time"] + 1}
    write_ledger(study, [*events, again, ended])
    Feed(study.folder).close()
    assert said(study) == [["finished", "stopped"]]


def test_a_process_that_is_killed_is_started_again(tiny: Tiny) -> None:
    study = alerting(tiny, "killed")
    events, failed = with_failure(study)
    half = len(events) // 2
    process = Sinks(study)
    with Ledger(study.folder) as ledger:
        replay(ledger, events[:half])
        process.start()
        wait_for(lambda: bool(said(study)))
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: process.pid != first)
        replay(ledger, events[half:])
    process.close()
    heard = said(study)
    assert ["failed", failed] in heard
    assert ["finished", events[-1]["outcome"]] in heard
    assert len({tuple(words) for words in heard}) == len(heard)


def test_what_no_environment_takes_ends_nothing(tiny: Tiny) -> None:
    study = alerting(tiny, "odd")
    events, failed = with_failure(study)
    for event in events:
        if event["event"] == "failed":
            event["error"] = "\0" + "x" * 200_000
    write_ledger(study, events)
    Feed(study.folder).close()
    assert ["failed", failed] in said(study)
    assert "finished" in [words[0] for words in said(study)]


def test_alerts_go_on_where_tensorboard_fails(tiny: Tiny) -> None:
    study = alerting(tiny, "no-board", "tensorboard=true")
    write_ledger(study, made_up_events(study))
    (study.folder / sinks.TENSORBOARD).write_text("in the way")
    Feed(study.folder).close()
    assert "finished" in [words[0] for words in said(study)]
    assert "no more TensorBoard files" in (study.folder / "alerts.log").read_text()


def test_commands_of_alerts_are_in_no_report_and_not_in_mlflow(tiny: Tiny) -> None:
    study = tiny(
        "secret",
        "alerts={best: 'curl https://example.org/T0/hush'}",
        "small={alerts: {best: 'curl https://example.org/T1/hush'}, epochs: 1,"
        " alerts.failed: 'curl https://example.org/T2/hush'}",
    )
    state = fold(made_up_events(study))
    assert state.config.alerts["best"].endswith("hush")
    page = (write_report(state, study.folder / "report") / "report.html").read_text()
    assert "(a command)" in page
    assert "hush" not in page
    assert "hush" not in documents_of(state.plan)["config.yaml"]


def test_a_command_that_fails_or_hangs_is_logged(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "ALERT_SECONDS", 3.0)
    study = tiny(
        "bad", "alerts={finished: 'sleep 600 & echo hanging; wait', best: 'no-such-thing'}"
    )
    write_ledger(study, made_up_events(study))
    Feed(study.folder).close()
    log = (study.folder / "alerts.log").read_text()
    assert "hanging" in log
    assert re.search(r": killed after [0-3](\.\d+)? s\n", log), log
    assert "exit code 127" in log


def test_commands_that_hang_hold_neither_the_others_nor_the_end_up(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "ALERT_SECONDS", 2.0)
    study = tiny("hang", f"alerts={{failed: 'sleep 600', finished: '{SAY}'}}", "seeds=[0,1,2]")
    events = made_up_events(study)
    reason = {"error": "made up", "event": "failed"}
    write_ledger(
        study, [{**event, **reason} if event["event"] == "finished" else event for event in events]
    )
    Feed(study.folder).close()
    assert said(study) == [["finished", events[-1]["outcome"]]]
    outcomes = re.findall(
        r"^failed .*: (killed|not run)", (study.folder / "alerts.log").read_text(), re.M
    )
    assert outcomes[0] == "killed"
    assert len(outcomes) == sum(event["event"] == "finished" for event in events)
    assert outcomes[-1] == "not run"


@pytest.mark.slow
def test_a_real_study_alerts_and_does_not_repeat_itself(tiny: Tiny) -> None:
    study = alerting(tiny, "real")
    run_study(study, SilentView(), lambda line: None)
    heard = said(study)
    assert Counter(words[0] for words in heard)["finished"] == 1
    assert Counter(words[0] for words in heard)["best"] >= 1
    run_study(study, SilentView(), lambda line: None)
    assert [words for words in said(study) if words[0] == "best"] == [
        words for words in heard if words[0] == "best"
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("alerts={ended: 'true'}", "alerts='ended': must be one of finished, failed, best"),
        ("alerts={best: ''}", "alerts.best='': must be a shell command"),
    ],
)
def test_bad_alerts_are_refused(tiny: Tiny, change: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        tiny("refused", change)


@pytest.mark.skipif(find_spec("tensorboard") is not None, reason="tensorboard is not installed")
def test_tensorboard_is_asked_for_before_anything_starts(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=re.escape("pip install 'lns-study[tensorboard]'")):
        check_sinks(tiny("absent", "tensorboard=true"))


def points(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The scalars in the event files below a folder, by run and tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, Any] = {}
    for run in folder.iterdir():
        accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0})
        accumulator.Reload()
        found[run.name] = {
            tag: [(point.step, point.value) for point in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]
        }
        assert "_hparams_/experiment" in accumulator.summary_metadata
    return found


@needs_tensorboard
def test_tensorboard_has_the_ledgers_points_once(tiny: Tiny) -> None:
    study = tiny("board", "tensorboard=true", "trial.epochs=3")
    events = made_up_events(study)
    half = len(events) // 2
    with Ledger(study.folder) as ledger:
        replay(ledger, events[:half])
        Feed(study.folder).close()
        replay(ledger, events[half:])
    process = Sinks(study)
    process.start()
    process.close()
    while Path(f"/proc/{process.pid}").exists():  # on a busy machine it takes longer than the wait
        time.sleep(0.1)
    found = points(study.folder / "tensorboard")
    state = fold(read_ledger(study.folder))
    assert len(found) == len(state.trials)
    for trial in state.trials:
        (run,) = [name for name in found if name.endswith(trial.id)]
        for name in trial.reports[1]["metrics"]:
            if name != "epoch":
                wanted = [
                    (step, pytest.approx(value)) for step, value in trial.metric(name).items()
                ]
                assert found[run][name] == wanted
        for name, value in trial.test.items():
            assert found[run][name] == [(trial.epochs, pytest.approx(value))]


def test_notes_are_lines_of_json(tiny: Tiny) -> None:
    """A torn last line is ignored."""
    study = alerting(tiny, "torn")
    write_ledger(study, made_up_events(study))
    study.folder.joinpath("alerts.jsonl").write_text('{"key": "began"}\n{"key": "be')
    Feed(study.folder).close()
    lines = study.folder.joinpath("alerts.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines].count("began") == 2
    assert [words[0] for words in said(study)].count("finished") == 1
