"""TensorBoard's files and alerts, from real ledgers, with real commands."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from study.api import run_study
from study.config import StudyConfig
from study.execution.preflight import preflight
from study.ledger.lines import Event
from study.ledger.log import Ledger, read_ledger
from study.ledger.state import fold
from study.plan.plan import make_plan
from study.tracking import sinks
from study.tracking.sinks import Feed, Sinks
from tests.study.conftest import SilentView, made_up_events, write_ledger

Tiny = Callable[..., StudyConfig]
SAY = (
    "echo $LNS_STUDY_EVENT $LNS_STUDY_TRIAL $LNS_STUDY_VALUE$LNS_STUDY_OUTCOME"
    " >> $LNS_STUDY_FOLDER/said"
)
needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def alerting(tiny: Tiny, name: str, *overrides: str) -> StudyConfig:
    """A study that says every event in a file."""
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
            event["event"],
            **{key: value for key, value in event.items() if key not in ("event", "time")},
        )


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
    assert values[-1] == min(finals.values())


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


def test_a_command_that_fails_or_hangs_is_logged(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "ALERT_SECONDS", 0.5)
    study = tiny(
        "bad", "alerts={finished: 'sleep 600 & echo hanging; wait', best: 'no-such-thing'}"
    )
    write_ledger(study, made_up_events(study))
    Feed(study.folder).close()
    log = (study.folder / "alerts.log").read_text()
    assert "hanging" in log
    assert "killed after 0.5 s" in log
    assert "exit code 127" in log


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
        preflight(make_plan(tiny("absent", "tensorboard=true")))


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
    """A torn last line is passed over."""
    study = alerting(tiny, "torn")
    write_ledger(study, made_up_events(study))
    study.folder.joinpath("alerts.jsonl").write_text('{"key": "began"}\n{"key": "be')
    Feed(study.folder).close()
    lines = study.folder.joinpath("alerts.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines].count("began") == 2
    assert [words[0] for words in said(study)].count("finished") == 1
