"""MLflow, fed from the ledger by one background thread: training never waits for a server.

The thread keeps its own :class:`~study.state.StudyState` and a set of trials with news. Each round it pushes what a trial has
that MLflow has not, all epochs at once (``log_batch``), so a slow server costs fewer, larger calls. If the server dies the news
stay in the set, one warning is printed, and the thread tries again every few seconds; what is left at the end is pushed by
``lns-study report``, which reads the ledger.

A rerun doubles nothing: runs are found by the tag ``lns_study.key`` (``create_run`` is not idempotent), and a metric with the
same run, key, step, value and timestamp is the same row in MLflow; timestamps are the ledger's.

Layout: one experiment a study, one parent run a ledger (report, summary), one child run a trial. More seeds or rows keep the runs there
are: keys are made of the ledger's id and the trial's, not of the plan.
Limits: 1,000 metrics, 100 params, 100 tags a call; metric names of letters, digits and ``_ - . : /`` and space.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from study.ledger import Event
from study.space import describe
from study.state import ENDED, FAILED, FINISHED, PLANNED, RUNNING, STOPPED, StudyState, TrialState, flatten, name_of

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Set before MLflow is imported, unless the user set them: no telemetry, a dead server is noticed in seconds, not minutes."""

KEY_TAG = "lns_study.key"
PARENT_TAG = "mlflow.parentRunId"
BATCH = 1000
RETRY_SECONDS = 5.0

MLFLOW_STATUS = {RUNNING: "RUNNING", FINISHED: "FINISHED", STOPPED: "FINISHED", FAILED: "FAILED", PLANNED: "KILLED"}
"""A trial that a scheduler ended early did what it was to do; the tag ``stopped_by`` tells it apart."""

SETTING = "cfg/"
"""Numeric settings are metrics as well, ``cfg/optimizer.lr``: MLflow can compare and plot metrics, params only for equality."""


def connect(uri: str) -> Any:
    """An ``MlflowClient`` for a tracking URI, telemetry off and migration chatter silenced."""
    import logging

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for logger in ("alembic", "mlflow", "sqlalchemy"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def check_tracking(uri: str) -> None:
    """One small request; makes the sqlite database if that is what the URI names.

    Raises:
        ValueError: nothing answers there, or not MLflow.
    """
    if uri == OFF:
        return
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception as error:
        raise ValueError(
            f"tracking_uri={uri!r}: no MLflow tracking store answers ({_reason(error)}); start a server with `lns-study ui`, correct the "
            "address, or leave tracking_uri out for a local sqlite file"
        ) from None


OFF = "none"
"""As a tracking URI: nothing is sent to MLflow."""


class NoTracker:
    """Stands in for :class:`Tracker` where tracking is off; `lns-study report --tracking-uri` can send the ledger later."""

    def start(self, history: list[Event]) -> None:
        """Nothing to begin."""

    def listen(self, event: Event) -> None:
        """Nothing to hear."""

    def close(self, report: Path | None) -> str:
        """Nothing is missing."""
        return ""

    def parent_run(self) -> None:
        """There is none."""
        return


def make_tracker(uri: str, artifacts: Path, warn: Callable[[str], None]) -> Tracker | NoTracker:
    """The tracker for a URI; see :class:`Tracker`."""
    return NoTracker() if uri == OFF else Tracker(uri, artifacts, warn)


class Tracker:
    """Keeps an MLflow store in step with a study.

    Args:
        uri: MLflow tracking URI.
        artifacts: folder for artifacts where the store is a local database; servers choose their own.
        warn: called once with a sentence when the store stops answering.
    """

    def __init__(self, uri: str, artifacts: Path, warn: Callable[[str], None]) -> None:
        self._uri, self._artifacts, self._warn = uri, artifacts, warn
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._pusher: _Pusher | None = None
        self._state = StudyState()
        self._news: set[str] = set()
        self._failure = ""
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="mlflow-writer", daemon=True)

    def start(self, history: list[Event]) -> None:
        """Begin with the events there are; later ones come through :meth:`listen`."""
        for event in history:
            self._hear(event)
        self._thread.start()

    def listen(self, event: Event) -> None:
        """Queue one event; never blocks."""
        self._queue.put(event)

    def close(self, report: Path | None) -> str:
        """Push what is left, attach the report's folder, close every run.

        Returns:
            Why something could not be pushed, or "" if MLflow has it all.
        """
        self._queue.put(None)
        self._thread.join()
        self._push()
        if not self._failure and self._pusher and self._state.plan:
            self._attempt(lambda: self._finish(report))
        return self._failure

    def parent_run(self) -> tuple[str, str] | None:
        """Experiment id and run id of the study's parent run, once there is one."""
        return self._pusher.parent_ids if self._pusher else None

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._drain()
            if not ended and time.monotonic() >= self._retry_at:
                self._push()

    def _drain(self) -> bool:
        """Take the events that wait, at least one or half a second's; True at the end."""
        try:
            event = self._queue.get(timeout=0.5)
            while event is not None:
                self._hear(event)
                event = self._queue.get_nowait()
        except queue.Empty:
            return False
        return True

    def _hear(self, event: Event) -> None:
        self._state.apply(event)
        if event["event"] == "planned":
            self._news |= {trial.id for trial in self._state.trials if trial.reports or trial.status != PLANNED}
        elif "trial" in event:
            self._news.add(event["trial"])

    def _push(self) -> None:
        for trial in [trial for trial in self._state.trials if trial.id in self._news]:
            if not self._attempt(lambda trial=trial: self._client().push(trial)):  # type: ignore[misc]
                return
            self._news.discard(trial.id)

    def _finish(self, report: Path | None) -> None:
        for trial in self._state.trials:
            self._client().settle(trial)
        self._client().finish(self._state, report)

    def _client(self) -> _Pusher:
        if self._pusher is None or self._pusher.plan is not self._state.plan:
            self._pusher = _Pusher(
                connect(self._uri), self._state.plan, self._artifacts if self._uri.startswith("sqlite") else None
            )
        return self._pusher

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do it; on failure remember why, warn the first time, and wait before the next try."""
        try:
            action()
        except Exception as error:  # whatever the store raises, training goes on
            if not self._failure:
                self._warn(
                    f"MLflow at {self._uri} does not answer ({_reason(error)}); training goes on, the ledger keeps everything, and "
                    f"`lns-study report` sends it later"
                )
            self._failure = _reason(error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        self._failure = ""
        return True


class _Pusher:
    """One plan's runs in one MLflow store. Every method may be repeated."""

    def __init__(self, client: Any, plan: Event, artifacts: Path | None) -> None:
        self._client, self.plan = client, plan
        self._name = plan["study"]["name"]
        self._key = str(plan["ledger"])
        self._experiment = self._ensure_experiment(artifacts)
        self._parent, self._status = self._ensure_run(self._key, self._name, plan["time"], _parent_tags(plan))
        if self._status != "RUNNING":
            client.update_run(self._parent, status="RUNNING")
        self._known = self._runs_of_ledger()
        self._runs: dict[str, str] = {}
        self._sent: dict[str, set[int]] = {}
        self._closed: set[str] = set()

    @property
    def parent_ids(self) -> tuple[str, str]:
        """Experiment id and parent run id."""
        return self._experiment, self._parent

    def push(self, trial: TrialState) -> None:
        """Send the epochs of a trial that MLflow lacks, and its end if it has ended."""
        run, new = self._run_of(trial)
        if trial.id in self._closed and trial.status in (FINISHED, STOPPED):
            return
        fresh = {epoch: event for epoch, event in sorted(trial.reports.items()) if epoch not in self._sent[trial.id]}
        metrics = [metric for epoch, event in fresh.items() for metric in _metrics(event["metrics"], epoch, event["time"])]
        settings = _metrics(_settings(trial.config), 0, trial.started or self.plan["time"]) if new else []
        ended = trial.status in ENDED
        self._log(
            run,
            [*settings, *metrics, *_metrics(trial.test, trial.epochs, trial.ended or 0.0)],
            params=list(_params(trial.config)) if new else [],
            tags=_end_tags(trial) if ended else [],
        )
        self._sent[trial.id] |= set(fresh)
        if ended:
            self._client.set_terminated(run, MLFLOW_STATUS[trial.status], end_time=int((trial.ended or time.time()) * 1000))
            self._closed.add(trial.id)
        elif trial.id in self._closed:
            self._client.update_run(run, status="RUNNING")
            self._closed.discard(trial.id)

    def settle(self, trial: TrialState) -> None:
        """Close the run of a trial that stopped without an end: the study was interrupted."""
        if trial.id in self._runs and trial.id not in self._closed:
            self._client.set_terminated(self._runs[trial.id], "KILLED")
            self._closed.add(trial.id)

    def finish(self, state: StudyState, report: Path | None) -> None:
        """Attach the report, write each row's mean and spread, close the parent run."""
        from study.results import summarise

        summary: dict[str, float | None] = {}
        for row in summarise(state).rows:
            label = re.sub(r"[^\w\-.:/ ]", "_", row.label)
            summary |= {f"{label}/test_error_percent": row.mean, f"{label}/test_error_percent_sd": row.sd}
        time_ = max((trial.ended or 0.0 for trial in state.trials), default=0.0)
        self._log(self._parent, _metrics({k: v for k, v in summary.items() if v is not None}, 0, time_))
        if report is not None:
            self._client.log_artifacts(self._parent, str(report), "report")
        outcome = {"finished": "FINISHED", "failed": "FAILED"}.get(state.outcome, "KILLED")
        self._client.set_terminated(self._parent, outcome)

    def _ensure_experiment(self, artifacts: Path | None) -> str:
        found = self._client.get_experiment_by_name(self._name)
        if found is None:
            location = (artifacts / re.sub(r"\W+", "-", self._name)).as_uri() if artifacts else None
            return str(self._client.create_experiment(self._name, artifact_location=location))
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _ensure_run(self, key: str, name: str, started: float, tags: dict[str, str]) -> tuple[str, str]:
        """Run id and status of the run tagged ``key``, made if there is none."""
        found = self._client.search_runs([self._experiment], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
        if found:
            return found[0].info.run_id, found[0].info.status
        tags = {KEY_TAG: key, **tags}
        run = self._client.create_run(self._experiment, start_time=int(started * 1000), tags=tags, run_name=name)
        return run.info.run_id, "RUNNING"

    def _runs_of_ledger(self) -> dict[str, tuple[str, str]]:
        """Run id and status of every trial's run there is, by key; one question for all, not one a trial."""
        found: dict[str, tuple[str, str]] = {}
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment], f"tags.`{KEY_TAG}` LIKE '{self._key}/%'", max_results=BATCH, page_token=token
            )
            found |= {run.data.tags[KEY_TAG]: (run.info.run_id, run.info.status) for run in page}
            token = page.token
            if not token:
                return found

    def _run_of(self, trial: TrialState) -> tuple[str, bool]:
        """The trial's run, made if there is none, and whether this is the first that we see of it."""
        new = trial.id not in self._runs
        if new:
            key = f"{self._key}/{trial.id}"
            run, status = self._known.get(key) or self._make_run(key, trial)
            self._runs[trial.id], self._sent[trial.id] = run, set()
            if status == "FINISHED":
                self._closed.add(trial.id)
            elif status != "RUNNING":  # killed or failed before, goes on now
                self._client.update_run(run, status="RUNNING")
        return self._runs[trial.id], new

    def _make_run(self, key: str, trial: TrialState) -> tuple[str, str]:
        tags = {KEY_TAG: key, **_trial_tags(trial, self.plan), PARENT_TAG: self._parent}
        began = int((trial.started or time.time()) * 1000)
        run = self._client.create_run(self._experiment, start_time=began, tags=tags, run_name=name_of(trial))
        return run.info.run_id, "RUNNING"

    def _log(self, run: str, metrics: list[Any], params: Sequence[Any] = (), tags: Sequence[Any] = ()) -> None:
        room = BATCH - len(params) - len(tags)
        if metrics or params or tags:
            self._client.log_batch(run, metrics=metrics[:room], params=params, tags=tags)
        for first in range(room, len(metrics), BATCH):
            self._client.log_batch(run, metrics=metrics[first : first + BATCH])


def _metrics(values: dict[str, Any], epoch: int, seconds: float) -> list[Any]:
    from mlflow.entities import Metric

    return [Metric(name, float(value), int(seconds * 1000), epoch) for name, value in values.items() if name != "epoch"]


def _params(config: dict[str, Any], prefix: str = "") -> Iterator[Any]:
    """A nested config as flat MLflow params, ``precision.format`` and so on."""
    from mlflow.entities import Param

    for name, value in config.items():
        if isinstance(value, dict):
            yield from _params(value, f"{prefix}{name}.")
        else:
            yield Param(f"{prefix}{name}", str(value))


def _settings(config: dict[str, Any]) -> dict[str, float]:
    """The numbers of a config under ``cfg/`` and their dotted key."""
    return {
        f"{SETTING}{name}": float(value)
        for name, value in flatten(config).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _end_tags(trial: TrialState) -> list[Any]:
    """What is known of a trial once it has ended."""
    from mlflow.entities import RunTag

    tags = {"restarts": str(trial.restarts), "stopped_by": trial.stopped_by, "error": trial.error[:5000]}
    return [RunTag(name, value) for name, value in tags.items() if value]


def _code_tags(plan: Event) -> dict[str, str]:
    code = plan["provenance"]
    versions = {f"version.{name}": version for name, version in code["versions"].items()}
    return {"git.commit": str(code["commit"]), "git.dirty": str(code["dirty"]), "python": code["python"], **versions}


def _parent_tags(plan: Event) -> dict[str, str]:
    question = {"mlflow.note.content": plan["study"]["question"]} if plan["study"]["question"] else {}
    data = "; ".join(f"{entry['source']} (sha256 {entry['digest'][:12]})" for entry in plan["data"])
    return {"study": plan["study"]["name"], "kind": "study", "data": data, **question, **_code_tags(plan)}


def _trial_tags(trial: TrialState, plan: Event) -> dict[str, str]:
    names = {"study": plan["study"]["name"], "kind": "trial", "row": trial.row, "seed": str(trial.seed), "trial": trial.id}
    config = trial.config
    names |= {"format": config["precision"]["format"], "workers": str(config["workers"])}
    if trial.number is not None:
        names |= {"configuration": str(trial.number), "sampled": describe(trial.params)[:5000]}
    return names | _code_tags(plan)


def _reason(error: Exception) -> str:
    """The innermost cause in one line, without the URL's retries."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
