"""Running trials that have not reported for an unusually long time.

A frozen process (SIGSTOP, swapping, a hanging driver) does not die, so without this check a study
would wait without a message. A trial counts as silent after :data:`EPOCHS` times its slowest epoch,
at least :data:`LEAST_SECONDS`. Before the first epoch of its process, during which kernels compile
and data are read, it counts as silent after :data:`FIRST_SECONDS`.

Silent trials are shown, and not killed: a slow disk, a busy machine or a long evaluation is silent
too, and each restart counts towards ``max_failures``. Set ``heartbeat`` if you know how long an
epoch can take. A frozen process that continues gives the same bits.
"""

from __future__ import annotations

import math
import time

from study.ledger.state import RUNNING, StudyState, TrialState, name_of
from study.text import duration

EPOCHS, LEAST_SECONDS, FIRST_SECONDS = 5.0, 60.0, 600.0


def patience(trial: TrialState, checkpoint_every: int = 0) -> float:
    """Return the longest usual time between two reports of a running trial (seconds).

    A restarted process may repeat up to ``checkpoint_every`` epochs, which it does not report
    again.
    """
    slowest = max(trial.took.values(), default=0.0)
    if _has_reported(trial):
        return max(LEAST_SECONDS, EPOCHS * slowest)
    return max(FIRST_SECONDS, (EPOCHS + min(checkpoint_every, trial.epoch)) * slowest)


def silence(trial: TrialState, now: float, checkpoint_every: int) -> float:
    """Return the seconds since a silent trial's last message; 0 for other trials."""
    if trial.status != RUNNING or trial.process_since is None:
        return 0.0
    quiet = now - trial.last_heard
    return quiet if quiet > patience(trial, checkpoint_every) else 0.0


def describe_silence(trial: TrialState, quiet: float, heartbeat: float | None) -> str:
    """Describe a trial that was silent for ``quiet`` seconds, and the remedy."""
    slowest = max(1.0, max(trial.took.values(), default=0.0))
    usual = (
        f"its epochs took {duration(slowest)} at most"
        if _has_reported(trial)
        else "and no epoch since its start"
    )
    if heartbeat is not None:
        remedy = f"after heartbeat={heartbeat:g} s it is restarted from its last checkpoint"
    else:
        usually = 60 * math.ceil(patience(trial) / 60)
        last = trial.reports[trial.epoch] if _has_reported(trial) else None
        process = ""
        if last is not None and last.get("pid"):
            process = f"kill process {last['pid']} on {last['host']}, or "
        remedy = (
            f"if it hangs, {process}end the study and run it again with heartbeat={usually}; either"
            " begins it again from its last checkpoint"
        )
    return f"{name_of(trial)}: nothing heard for {duration(quiet)}, {usual}; {remedy}"


def describe_silent(state: StudyState, now: float) -> list[str]:
    """Return a line for every silent trial."""
    heartbeat = state.config.heartbeat
    return [
        describe_silence(trial, quiet, heartbeat)
        for trial in state.trials
        if (quiet := silence(trial, now, state.config.checkpoint_every))
    ]


def _has_reported(trial: TrialState) -> bool:
    """Return whether the trial's current process has finished an epoch."""
    last = max(trial.took, default=0)
    return last > 0 and trial.reports[last]["time"] > (trial.process_since or 0.0)


class Watch:
    """Time of the last message of each running trial, by a monotonic clock."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._silent: set[str] = set()

    def hear(self, trial: str) -> bool:
        """Record a message of a trial; return whether the trial was silent before."""
        self._heard[trial] = time.monotonic()
        was_silent = trial in self._silent
        self._silent.discard(trial)
        return was_silent

    def forget(self, trial: str) -> None:
        """Record that a trial has ended."""
        self._heard.pop(trial, None)
        self._silent.discard(trial)

    def forgive(self, seconds: float) -> None:
        """Do not count seconds in which the driver was blocked or stopped."""
        now = time.monotonic()
        self._heard = {trial: min(now, heard + seconds) for trial, heard in self._heard.items()}

    def hung(self, limit: float) -> list[str]:
        """Return the trials that were silent for longer than a heartbeat, and reset their time."""
        now = time.monotonic()
        found = [trial for trial, heard in self._heard.items() if now - heard > limit]
        self._heard |= dict.fromkeys(found, now)
        return found

    def newly_silent(self, state: StudyState) -> list[tuple[TrialState, float]]:
        """Return the trials that became silent since the last call, with their seconds."""
        now = time.monotonic()
        found = [
            (state.known[trial], now - heard)
            for trial, heard in self._heard.items()
            if trial not in self._silent and now - heard > patience(state.known[trial])
        ]
        self._silent |= {trial.id for trial, _ in found}
        return found
