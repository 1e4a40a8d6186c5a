"""Ray Tune's events as ledger events. Runs in the study's main process, inside Tune's loop: it only appends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import tune

from study.control import is_full
from study.ledger import Ledger
from study.outcomes import DAMAGED, OUT_OF_MEMORY, REFUSED, last_line
from trainers.records import HISTORY

EXTRA = ("samples_per_second",)
"""Metrics beside those of a namespace (``train/loss``)."""


class LedgerCallback(tune.Callback):  # type: ignore[misc]
    """Writes what Tune tells of its trials into the ledger.

    A trial's epoch report and its final test figures arrive in one Tune result; the ledger keeps them apart, so that a
    result without training metrics (a trial restored after its last epoch) adds no empty epoch. A result may bring earlier epochs
    along (``HISTORY``); the ledger takes those that it lacks.

    Args:
        ledger: takes the events.
        scheduler: name of what may end trials early.
        heartbeat: seconds without a report after which a trial's process is killed, to be started again; None never.
        relieve: asked, with what the allocator said, whether a trial that ran out of memory is tried once more, in another way.
        storage_failed: told why the storage takes no more, the ledger's or a trial's files. That is no failure of the trial.
    """

    def __init__(
        self,
        ledger: Ledger,
        scheduler: str = "none",
        heartbeat: float | None = None,
        storage_failed: Callable[[str], None] = lambda reason: None,
        relieve: Callable[[str, str], bool] = lambda trial, error: False,
    ) -> None:
        self._ledger, self._scheduler, self._heartbeat = ledger, scheduler, heartbeat
        self._storage_failed, self._relieve = storage_failed, relieve
        self._heard: dict[Any, float] = {}
        self._hung: dict[str, str] = {}
        self._tests: dict[str, dict[str, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks into a snapshot that we never read; a ledger cannot be pickled."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial's process began, or began again."""
        self._heard[trial] = time.monotonic()
        self._append("started", trial=_id(trial))

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        """An epoch is done; the last one's result also has the test figures."""
        self._heard[trial] = time.monotonic()
        for past in result.get(HISTORY, []):
            self._append("report", trial=_id(trial), epoch=int(past["epoch"]), metrics=_metrics(past))
        metrics = _metrics(result)
        test = {name: value for name, value in metrics.items() if name.startswith("test/")}
        epoch = {name: value for name, value in metrics.items() if name not in test}
        if test:
            self._tests[_id(trial)] = test
        if result.get(DAMAGED):
            self._append("damaged", trial=_id(trial), error=str(result[DAMAGED]))
        if epoch:
            where = {"pid": result.get("pid"), "host": result.get("hostname")}
            self._append("report", trial=_id(trial), epoch=int(result["epoch"]), metrics=epoch, **where)
        if result.get("checkpoint_path"):
            self._append("checkpoint", trial=_id(trial), epoch=int(result["epoch"]), path=result["checkpoint_path"])

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Kill the process of a trial that has been silent for too long; Tune then starts it again."""
        if self._heartbeat is None:
            return
        now = time.monotonic()
        for trial in [trial for trial, heard in self._heard.items() if now - heard > self._heartbeat]:
            actor = trial.temporary_state.ray_actor
            if actor is not None:
                self._hung[_id(trial)] = f"no report for {self._heartbeat:g} s, so its process was killed (heartbeat)"
                ray.kill(actor)
            self._heard[trial] = now

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial's process died; Tune will start it again."""
        self._heard.pop(trial, None)
        error = self._hung.pop(_id(trial), "") or _error(trial)
        if is_full(error):
            self._storage_failed(error)
        self._append("restarted", trial=_id(trial), error=error)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial is done, or the scheduler ended it early."""
        self._heard.pop(trial, None)
        test, last = self._tests.get(_id(trial)), trial.last_result or {}
        if last.get(REFUSED):
            self._append("failed", trial=_id(trial), error=str(last[REFUSED]))
        elif last.get(OUT_OF_MEMORY):
            if not self._relieve(_id(trial), str(last[OUT_OF_MEMORY])):
                self._append("failed", trial=_id(trial), error=f"out of memory: {last[OUT_OF_MEMORY]}")
        elif test is not None:
            self._append("finished", trial=_id(trial), metrics=test)
        elif self._scheduler != "none":
            self._append("stopped", trial=_id(trial), by=self._scheduler)
        elif last.get("done"):
            self._append("failed", trial=_id(trial), error="the trial ended without test figures")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial failed for good."""
        self._heard.pop(trial, None)
        error = self._hung.pop(_id(trial), "") or _error(trial)
        if is_full(error):
            self._storage_failed(error)
        else:
            self._append("failed", trial=_id(trial), error=error)

    def _append(self, event: str, **values: Any) -> None:
        try:
            self._ledger.append(event, **values)
        except OSError as error:
            self._storage_failed(f"ledger: {error}")


def _metrics(result: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in result.items()
        if ("/" in name or name in EXTRA) and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _id(trial: Any) -> str:
    return str(trial.config["id"])


def _error(trial: Any) -> str:
    """The last line of a trial's error, which names what happened; "" if Tune kept none."""
    try:
        text = Path(trial.error_file).read_text() if trial.error_file else ""
    except OSError:
        text = ""
    return last_line(text).partition(" Worker exit type")[0] or "the trial's process died"
