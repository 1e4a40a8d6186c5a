"""The state of a study, folded from its ledger's events; progress, tracking and the report read it.

The last ``planned`` event says which trials belong to the study now; older ones stay in the ledger
and count again if a later plan names them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from study.config import StudyConfig
from study.config.keys import apply
from study.config.search import MOST_VALUES
from study.ledger.events import Event, Planned, Report, TrialEvent, TrialValues
from study.ledger.slots import Run, follow
from study.text import NAME, cut, one_line
from study.tracking_uri import without_passwords
from trainers.object_store import is_url

ALL, UNFINISHED, ONLY_FAILED = "all", "unfinished", "failed"
"""Options for the trials of a run: all unfinished ones; unfinished ones that have not failed; only
failed ones."""

PLANNED, RUNNING = "planned", "running"
FINISHED: Final = "finished"
FAILED: Final = "failed"
STOPPED: Final = "stopped"
ENDED = (FINISHED, FAILED, STOPPED)
"""Final states of a trial in this run of the study: done, given up, or ended by the scheduler."""
ID = re.compile(r"[\w-]+")
"""Form of a trial's id."""
COMMAND = "(a command)"
"""Text shown in place of an alert's command."""


@dataclass(kw_only=True)
class TrialState:
    """State of one trial.

    Attributes:
        id: id of the trial.
        row: label of its row.
        seed: its seed.
        config: its config, with the changes of ``relief``.
        status: ``planned``, ``running``, ``finished``, ``failed`` or ``stopped``.
        reports: report event by epoch.
        test: final metrics, ``test/loss`` and ``test/error`` (a fraction); empty until finished.
        checkpoints: paths, oldest first.
        restarts: number of restarts after a dead process or a drained node.
        error: last error, or "".
        commits: git commits of the runs that trained it, also in the study that it was copied from.
        number: number of the configuration in its row; None if nothing is searched.
        params: sampled values by dotted key.
        asked: notes of the adaptive search that proposed the trial.
        started, ended: times in seconds since 1970, or None.
        ends: time of each end, with ``seconds`` at that time (None if unknown); several if a failed
            trial was retried.
        took: seconds by reported epoch, evaluation included; epochs without a known duration are
            left out.
        machines: hardware that it was trained on, in the form of the plan.
        spent: seconds in this trial and study, without copied epochs.
        source: id of the trial or folder of the study that epochs were copied from, or "".
        stopped_by: scheduler that ended it early, or "".
        relief: keys changed in ``config`` since it ran out of memory.
        last_heard: time of its last start or report.
        actor: Ray's id of its last supervisor; "" on the local engine.
        process_since: time of its last start; None while it has no process.
    """

    id: str
    row: str
    seed: int
    config: dict[str, Any]
    status: str = PLANNED
    reports: dict[int, Report] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    restarts: int = 0
    error: str = ""
    commits: list[str] = field(default_factory=list)
    machines: list[dict[str, Any]] = field(default_factory=list)
    number: int | None = None
    params: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    ends: list[tuple[float, float | None]] = field(default_factory=list)
    took: dict[int, float] = field(default_factory=dict)
    spent: float = 0.0
    source: str = ""
    stopped_by: str = ""
    relief: dict[str, Any] = field(default_factory=dict)
    last_heard: float = 0.0
    actor: str = ""
    process_since: float | None = None

    @property
    def epochs(self) -> int:
        """Number of epochs that the trial is to train."""
        return int(self.config["epochs"])

    @property
    def own_loop(self) -> bool:
        """Whether a loop of the user's own trains it, which may return before ``epochs``."""
        return bool(self.config.get("trainable", {}).get("name"))

    @property
    def epoch(self) -> int:
        """Return the last epoch reported; 0 before the first."""
        return max(self.reports, default=0)

    @property
    def seconds(self) -> float:
        """Return the seconds of all reported epochs, evaluation included, as far as known."""
        return sum(self.took.values())

    def metric(self, name: str, *, own: bool = False) -> dict[int, float]:
        """Return one reported metric by epoch, ascending; ``own`` leaves out epochs taken over."""
        return {
            epoch: float(self.reports[epoch]["metrics"][name])
            for epoch in sorted(self.reports)
            if name in self.reports[epoch]["metrics"]
            and not (own and "source" in self.reports[epoch])
        }

    def checkpoints_left(self) -> list[str]:
        """Return the checkpoints that are still on disk, or were in a store, newest first."""
        paths = dict.fromkeys(reversed(self.checkpoints))
        return [path for path in paths if is_url(path) or os.path.exists(path)]


@dataclass(kw_only=True)
class StudyState:
    """State of a study from its ledger.

    Attributes:
        plan: last ``planned`` event; {} before the first.
        stated: last ``planned`` event before the first trial started or was copied; the first
            ``planned`` event if that is unknown.
        known: all trials of all plans, by id.
        limits: limits as last edited; None if they were not edited.
        outcome: outcome of the last run: finished, failed, stopped, interrupted; "" while it runs
            or after it was killed.
        runs: runs with the slots that trials held, the oldest first.
        damage: description of the ledger's damage, or "".
        latest: mark of the last event, see :meth:`is_own`; "" before the first.
    """

    plan: Planned = field(default_factory=lambda: cast(Planned, {}))
    stated: Planned = field(default_factory=lambda: cast(Planned, {}))
    known: dict[str, TrialState] = field(default_factory=dict)
    limits: dict[str, Any] | None = None
    outcome: str = ""
    runs: list[Run] = field(default_factory=list)
    damage: str = ""
    latest: str = ""
    _marks: set[str] = field(default_factory=set)
    _early: dict[str, list[TrialEvent]] = field(default_factory=dict)
    _made: tuple[Any, StudyConfig] | None = field(default=None, repr=False, compare=False)

    @property
    def config(self) -> StudyConfig:
        """Config of the study as last planned; ValueError if no class here takes it."""
        values = self.plan["study"]
        if self._made is not None and self._made[0] is values:
            return self._made[1]
        try:
            self._made = values, (config := StudyConfig.from_dict(values))
            return config
        except (TypeError, ValueError) as error:
            name = cut(str(values.get("name")), NAME)
            raise ValueError(
                f"{name}: {error}; its config is of another version of this package: read it with"
                " that one"
            ) from None

    @property
    def trials(self) -> list[TrialState]:
        """Trials of the last plan, in its order."""
        return [self.known[trial["id"]] for trial in self.plan.get("trials", [])]

    @property
    def run(self) -> Run | None:
        """Last run whose capacity is known; None in ledgers written before that was noted."""
        return next((run for run in reversed(self.runs) if run.capacity), None)

    @property
    def began(self) -> bool:
        """Whether a trial that the ledger ever planned has started, or was taken over."""
        return any(trial.started is not None or trial.reports for trial in self.known.values())

    def counts(self) -> dict[str, int]:
        """Return the number of trials of the last plan by status."""
        return dict(Counter(trial.status for trial in self.trials))

    def rows(self) -> dict[str, list[TrialState]]:
        """Return the trials of the last plan by row label, rows in the config's order.

        A searched row may have none.
        """
        study = self.plan.get("study", {})
        labels = [row["label"] for row in study.get("rows", [])] or [study.get("name")]
        rows: dict[str, list[TrialState]] = {label: [] for label in labels if label}
        for trial in self.trials:
            rows.setdefault(trial.row, []).append(trial)
        return rows

    def apply(self, event: Event) -> None:
        """Apply one event.

        Events of unknown kinds are ignored. Events of unknown trials wait for the plan that names
        the trial, since the plan that did may have been lost.
        """
        self.latest = mark_of(event)
        self._marks.add(self.latest)
        follow(self.runs, event)
        if event["event"] == "planned":
            self._plan(event)
        elif event["event"] == "added":
            self._add(event["planned"])
            self.plan["trials"].append(event["planned"])
        elif event["event"] == "edited":
            self.limits = event["limits"]
        elif event["event"] == "lost" and self.plan:
            self.plan |= {
                "provenance": self.plan["provenance"] | {"commit": "unknown", "dirty": None},
                "hardware": {},
            }
        elif event["event"] == "ended":
            self.outcome = event["outcome"]
        elif event["event"] == "repaired":
            self._marks.update(event.get("marks", []))
        elif "trial" in event:
            if (trial := self.known.get(event["trial"])) is not None:
                _apply_to_trial(trial, self._with_origin(event), self.plan)
            else:
                self._early.setdefault(event["trial"], []).append(event)

    def is_own(self, mark: str) -> bool:
        """Return whether an object with this mark was made from this ledger, or from the ledger
        that this one is a copy of, before the copy.

        A mark identifies the last event that the maker of the object had read. A copy of a ledger
        has the same id, and different events after the copy.
        """
        return mark in self._marks

    def _with_origin(self, event: TrialEvent) -> TrialEvent:
        """Add seconds and code of the trial that a report was taken over from.

        Earlier versions did not write them.
        """
        origin = self.known.get(event.get("source", ""))
        if origin is None or "commits" in event or event["event"] != "report":
            return event
        return {"seconds": origin.took.get(event["epoch"]), "commits": origin.commits, **event}

    def _plan(self, event: Planned) -> None:
        seeds = event["study"].get("seeds")
        if isinstance(seeds, list) and len(seeds) > MOST_VALUES:  # before whatever takes a minute
            raise ValueError(f"seeds: {len(seeds):,}; must be at most {MOST_VALUES:,}")
        # earlier versions let two rows plan the same trial
        trials = {trial["id"]: trial for trial in event["trials"]}
        self.plan = event | {
            "trials": list(trials.values()),
            "study": study_without_password(event["study"]),
        }
        if not self.stated or not self.began:
            self.stated = self.plan
        self.outcome = ""
        self.limits = None
        for trial in event["trials"]:
            self._add(trial, retry=event.get("only") != UNFINISHED)

    def _add(self, trial: TrialValues, *, retry: bool = True) -> None:
        if not ID.fullmatch(trial["id"]):  # names folders
            raise ValueError(
                f"the ledger names a trial {trial['id']!r}, and ids have letters, digits, - and _"
                " alone; it was written by another program: read it with that one"
            )
        if trial["id"] not in self.known:
            state = self.known[trial["id"]] = TrialState(**trial)
            for event in self._early.pop(trial["id"], []):
                _apply_to_trial(state, event, LOST)
        state = self.known[trial["id"]]
        state.row, state.config = trial["row"], apply(trial["config"], state.relief)
        state.number, state.params, state.asked = (
            trial.get("number"),
            trial.get("params", {}),
            trial.get("asked", {}),
        )
        if state.status not in (FINISHED, STOPPED) and (retry or state.status != FAILED):
            state.status, state.error = PLANNED, ""


def mark_of(event: Event) -> str:
    """Return the mark of an event: its time, which no other event of any copy of the ledger has."""
    return repr(float(event["time"]))


LOST = cast(Planned, {"provenance": {"commit": "unknown", "dirty": None}})
"""Placeholder for a lost plan."""


def study_without_password(study: dict[str, Any]) -> dict[str, Any]:
    """Return a study's config without the passwords that ledgers of earlier versions contain."""
    found: dict[str, Any] = without_passwords(study)
    return found


def shown_study(study: dict[str, Any]) -> dict[str, Any]:
    """Return a study's config for what others read: without the commands of its alerts, and of its
    small form's, which may hold the secret address of a chat's webhook."""
    shown = _without_commands(study)
    return shown | {"small": _without_commands(study["small"])} if study.get("small") else shown


def _without_commands(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of a study's keys, nested or dotted, without the commands of alerts."""
    hidden = {
        key: dict.fromkeys(value, COMMAND) if isinstance(value, dict) else COMMAND
        for key, value in values.items()
        if key.partition(".")[0] == "alerts" and value
    }
    return values | hidden


def name_of(trial: TrialState) -> str:
    """Return a trial's name for people, in one line: ``lns12 #7, seed 0``."""
    number = "" if trial.number is None else f" #{trial.number}"
    return f"{one_line(trial.row, NAME)}{number}, seed {trial.seed}"


def fold(events: Iterable[Event]) -> StudyState:
    """Return the state of a study after ``events``."""
    state = StudyState()
    for event in events:
        state.apply(event)
    return state


def _apply_to_trial(trial: TrialState, event: TrialEvent, plan: Planned) -> None:
    time = event["time"]
    trial.source = event.get("source", trial.source)
    if event["event"] == "started":
        trial.status, trial.started = RUNNING, trial.started or time
        trial.last_heard = trial.process_since = time
        trial.actor = event.get("actor", "")
        trained_by = (
            [f"unknown, taken over from {event['source']}"]
            if "source" in event
            else [event.get("code") or code_of(plan)]
        )
        trial.commits = list(dict.fromkeys([*trial.commits, *event.get("commits", trained_by)]))
        elsewhere = "source" in event or "pid" in event  # taken over, or asked for by a loop
        machine = {} if elsewhere else plan.get("hardware", {})
        _note_machines(trial, event.get("machines", [machine]))
    elif event["event"] == "report":
        if event["epoch"] not in trial.reports:
            trial.reports[event["epoch"]] = event
            _take_time(trial, event)
        trial.commits = list(dict.fromkeys([*trial.commits, *event.get("commits", [])]))
        _note_machines(trial, event.get("machines", []))
        trial.last_heard = time
    elif event["event"] == "checkpoint":
        trial.checkpoints.append(event["path"])
    elif event["event"] == "restarted":
        trial.restarts, trial.error = trial.restarts + 1, event["error"]
        trial.process_since = None
    elif event["event"] == "relieved":
        trial.status, trial.error, trial.relief = PLANNED, event["error"], event["relief"]
        trial.config = apply(trial.config, trial.relief)
    elif event["event"] == "finished":
        trial.status, trial.test, trial.ended, trial.error = FINISHED, event["metrics"], time, ""
    elif event["event"] == "stopped":
        trial.status, trial.stopped_by, trial.ended = STOPPED, event["by"], time
    elif event["event"] == "failed":
        trial.status, trial.error, trial.ended = FAILED, event["error"], time
    if event["event"] in ENDED:
        trial.ends.append(
            (time, trial.seconds if trial.took.keys() == trial.reports.keys() else None)
        )


def _note_machines(trial: TrialState, machines: Iterable[dict[str, Any]]) -> None:
    trial.machines += [each for each in machines if each and each not in trial.machines]


def _take_time(trial: TrialState, event: Report) -> None:
    """Record the seconds of an epoch.

    Seconds of repeated epochs (``repeated``) count as spent only. For a copied epoch only the
    event's own ``seconds`` count, because its time may be the time of the copy.
    """
    measured = (
        None if "source" in event else max(0.0, event["time"] - (trial.last_heard or event["time"]))
    )  # another writer's clock may lag
    seconds = event.get("seconds", measured)
    if seconds is not None:
        trial.took[event["epoch"]] = seconds
        trial.spent += 0.0 if "source" in event else seconds + event.get("repeated", 0.0)


def code_of(plan: Planned) -> str:
    """Return the git commit of the code that made a plan, for people."""
    code = plan.get("provenance", {})
    return f"{code.get('commit') or 'no git commit'}{' (modified)' if code.get('dirty') else ''}"
