"""Intervals in which trials hold slots: the runs of a study, folded from its ledger's events.

A *slot* is the place of one process. A trial of several workers has several; it gets the lowest
free numbers. A trial holds its slots, and with them CPUs and a share of GPUs, from ``started`` to
the first of its ``finished``, ``stopped``, ``failed``, ``restarted`` and ``relieved``, or to the
end of the run: ``ended``, or the last event of a run that was killed.

Each event costs the same however many came before. What the figures mean is in
:mod:`study.results.utilisation`. Limits: ledgers written before slots were noted have no intervals.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from study.ledger.events import Event, Planned, Report, Started, TrialValues, trial_of

AGAIN = ("restarted", "relieved")
"""Events that end an interval and after which the trial waits to be started again."""
ENDS = ("finished", "stopped", "failed", *AGAIN)
INTERRUPTED = "interrupted"
"""End of an interval whose run ended before the trial did."""


@dataclass(kw_only=True, slots=True)
class Interval:
    """An interval in which a trial holds slots; times in seconds since 1970.

    Attributes:
        trial: id of the trial.
        row: label of its row.
        slots: numbers of the slots.
        hosts: machine of each slot.
        cpus, gpus: CPUs and GPUs that all slots hold together.
        waited: time from which the trial waited for the slots.
        begin: time at which it got them.
        end: time at which it gave them up; None while it holds them.
        how: event that ended the interval, or ``interrupted``; "" while it lasts.
        first, last: times of the trial's first and last report of an epoch; None before.
        first_seconds: seconds for which the trial's process trained before the first report, as it
            says itself; None where it does not.
        epochs: number of reported epochs.
        alone, alone_seconds: number of epochs during which surely no other trial ran, and their
            total seconds by the clock of the trial's process. The first epoch (compiles), the last
            epoch (tests) and epochs of a user's own loop are left out.
        last_alone: seconds of the last epoch so far, if no other trial ran; else 0.
        own_loop: whether a loop of the user's own trains it, whose epochs need not be alike.
    """

    trial: str
    row: str
    slots: list[int]
    hosts: list[str]
    cpus: float
    gpus: float
    waited: float
    begin: float
    end: float | None = None
    how: str = ""
    first: float | None = None
    last: float | None = None
    first_seconds: float | None = None
    epochs: int = 0
    alone: int = 0
    alone_seconds: float = 0.0
    last_alone: float = 0.0
    own_loop: bool = False


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Resources of the run from ``time`` on."""

    time: float
    cpus: float
    gpus: float
    nodes: int


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A waiting trial and its resources. ``trial`` is "" for a trial that a search has not proposed
    yet."""

    trial: str = ""
    cpus: float = 0.0
    gpus: float = 0.0


@dataclass(kw_only=True)
class Run:
    """One run of a study.

    Attributes:
        begin: time of the command; of the plan, where the ledger has not noted the former.
        planned: time of its plan.
        from_command: whether the time of the command is known.
        end: time of its last event.
        over: whether the run has ended, as far as the ledger knows.
        software: commit, versions and platform of the driver, as the plan notes them.
        outcome: its outcome, as :class:`~study.ledger.state.StudyState` has it.
        launch: times of the launch whose job it is (:mod:`study.engines.launch_times`); without
            those before the job started, where the job has been started again.
        most: largest number of trials at a time that the config allows; None for as many as fit.
        rows: row label by trial id.
        own_loops: ids of the trials that a loop of the user's own trains.
        capacity: resources after each change.
        intervals: intervals in the order of their beginning.
        running: intervals that have not ended, by trial id.
    """

    begin: float
    planned: float
    end: float
    from_command: bool = False
    over: bool = False
    software: dict[str, Any] = field(default_factory=dict)
    outcome: str = ""
    launch: dict[str, float] = field(default_factory=dict)
    most: int | None = None
    rows: dict[str, str] = field(default_factory=dict)
    own_loops: set[str] = field(default_factory=set)
    capacity: list[Capacity] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    running: dict[str, Interval] = field(default_factory=dict)
    _waiting: dict[str, float] = field(default_factory=dict)
    _alone_since: float | None = None

    @staticmethod
    def of(planned: Planned) -> Run:
        """Return the run that a ``planned`` event begins."""
        run = Run(
            begin=planned["time"] - planned.get("prepared", 0.0),
            planned=planned["time"],
            end=planned["time"],
            from_command="prepared" in planned,
            software=planned.get("provenance", {}),
            launch=dict(planned.get("launch", {})),
            most=planned.get("study", {}).get("max_concurrent"),
        )
        for trial in planned["trials"]:
            run._know(trial)
        return run

    def apply(self, event: Event) -> None:
        """Apply the next event of the run.

        Events taken over from elsewhere are skipped: they were no work of this run.
        """
        if "source" in event or self.over:
            return
        time, trial = event["time"], trial_of(event)
        self.end = time
        if event["event"] == "capacity":
            self.capacity.append(
                Capacity(time=time, cpus=event["cpus"], gpus=event["gpus"], nodes=event["nodes"])
            )
        elif event["event"] == "added":
            self._know(event["planned"])
            self._waiting[event["planned"]["id"]] = time
        elif event["event"] == "started" and "slots" in event:
            self._start(event)
        elif event["event"] == "report" and trial in self.running:
            self._report(self.running[trial], event)
        elif event["event"] in ENDS and trial in self.running:
            self._end(trial, time, event["event"])
        elif event["event"] == "ended":
            self.outcome = event["outcome"]
            self.close()

    def close(self) -> None:
        """Mark the run as over, and end every interval that still lasts."""
        for trial in list(self.running):
            self._end(trial, self.end, INTERRUPTED)
        self.over = True

    def so_far(self, now: float, waiting: Waiting | None) -> Run:
        """Return the run from its first trial's start, as if it ended now and ``waiting`` began, so
        that the waiting trial counts. It shares the intervals of this run.
        """
        trials = []
        if waiting is not None:
            waited = self._waiting.get(waiting.trial, self.begin) if waiting.trial else now
            one = Interval(
                **asdict(waiting), row="", slots=[], hosts=[], waited=waited, begin=now, end=now
            )
            trials.append(one)
        begin, intervals = self.intervals[0].begin, [*self.intervals, *trials]
        return replace(self, begin=begin, end=now, over=True, intervals=intervals)

    def _know(self, trial: TrialValues) -> None:
        self.rows[trial["id"]] = trial["row"]
        if trial.get("config", {}).get("trainable", {}).get("name"):
            self.own_loops.add(trial["id"])

    def _start(self, event: Started) -> None:
        trial, time = event["trial"], event["time"]
        if trial in self.running:
            self._end(trial, time, INTERRUPTED)
        interval = Interval(
            trial=trial,
            row=self.rows.get(trial, ""),
            slots=event["slots"],
            hosts=event["hosts"],
            cpus=event["cpus"],
            gpus=event["gpus"],
            waited=self._waiting.pop(trial, self.begin),
            begin=time,
            own_loop=trial in self.own_loops,
        )
        self.intervals.append(interval)
        self.running[trial] = interval
        self._alone_since = time if len(self.running) == 1 else None

    def _report(self, interval: Interval, event: Report) -> None:
        """Note an epoch, and whether it was trained alone.

        What the driver hears of at once has one time. Only an epoch after a report that came later
        than the others' end began after that; it lasted as long as the trial's process says.
        """
        time, seconds, last = event["time"], event.get("seconds"), interval.last
        interval.epochs += 1
        interval.alone += interval.last_alone > 0
        interval.alone_seconds += interval.last_alone
        interval.last_alone = 0.0
        if last is None:
            interval.first = time
            if seconds is not None:
                interval.first_seconds = seconds + event.get("repeated", 0.0)
        elif (
            self._alone_since is not None
            and self._alone_since < last < time
            and seconds is not None
            and seconds <= time - self._alone_since
            and not interval.own_loop
        ):
            interval.last_alone = seconds
        interval.last = time

    def _end(self, trial: str, time: float, how: str) -> None:
        interval = self.running.pop(trial)
        interval.end, interval.how = time, how
        if how in AGAIN:
            self._waiting[trial] = time
        self._alone_since = time if len(self.running) == 1 else None


def follow(runs: list[Run], event: Event) -> None:
    """Apply the next event of a ledger to its runs; a ``planned`` event begins a run."""
    if event["event"] == "planned":
        run = Run.of(event)
        if runs:
            runs[-1].close()
            if run.launch and run.launch["submitted"] < runs[-1].begin:
                run.launch = {key: run.launch[key] for key in ("started", "loaded")}
        runs.append(run)
    elif runs:
        runs[-1].apply(event)
