"""One ledger's runs in one MLflow store. All methods are idempotent: they may be repeated after a
lost reply, or by another process.

- Runs: ``create_run`` is not idempotent, so a run is first looked up by its tag ``lns_study.key``.
  If a lost reply has caused duplicates (*twins*), all but the oldest are deleted.
- Copies of a study: copies of a ledger have the same id, so a run also has a mark of the ledger
  that it was sent from (:meth:`~study.ledger.state.StudyState.is_own`). Runs that another copy sent
  after the copying are not found, changed or deleted (:func:`own_runs`).
- Metrics: timestamps come from the ledger, and MLflow stores a metric with the same run, key, step,
  value and timestamp only once.
- Progress is read from the store: the last step of a run shows which epochs it lacks. This also
  completes a database that was replaced or restored from a backup.

Layout: one experiment per study; one parent run per ledger with config, plan, environment and
report; one child run per trial with params, tags, data sets, metrics. Keys consist of the ledger's
id and the trial's, so a study extended by seeds or rows keeps its runs. Requests: five per trial
(creation, params and metrics, tags of its end, data set, end), one per file of its profile, and one
per batch of later reports.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study._compat import latest_metrics
from study.evidence.record import FILE, read_record
from study.ledger.events import Report
from study.ledger.state import ENDED, StudyState, TrialState, name_of
from study.tracking.artifacts import Artifacts
from study.tracking.models import log_models
from study.tracking.names import NONFINITE, SECONDS, is_old_setting
from study.tracking.payload import (
    KEY_TAG,
    KIND_TAG,
    LATER,
    MARK_TAG,
    MLFLOW_STATUS,
    PARENT_TAG,
    PROFILE,
    RESULT_TAGS,
    claim_tags,
    datasets_of,
    documents_of,
    end_metrics,
    expected_tags,
    metrics_of,
    params_of,
    parent_tags,
    point_of,
    profiles,
    report_metrics,
    row_figures,
    trial_tags,
)
from study.tracking.view import view_tag
from trainers.files import regular_files

BATCH = 1000
MOST_TAGS = 100
NAME_TAG = "mlflow.runName"
SENT = ("report.html", "report.md", FILE, "configurations.csv")
"""Files of a report that are sent, in addition to pictures (:data:`PICTURE`)."""
PICTURE = re.compile(r"[a-z][a-z_]*\.png")
TRACE = re.compile(r"rank-?\d+\.(json|json\.gz|txt)")
"""Pattern of a profile's files that are sent."""


@dataclass(kw_only=True)
class _Known:
    """The store's content for one run.

    Attributes:
        run: id of the run.
        status: MLflow's status of the run.
        end: time of its end in milliseconds since 1970; None before.
        last: last epoch with a metric; that epoch may be incomplete.
        params: names of its params.
        inputs: whether the data set was sent.
        results: its tags about the trial's end.
        parent: id of its parent run.
        row, name: label of the trial's row when it was sent, and the run's name.
        sent: epochs sent by this process.
        marked: whether it has the mark of its ledger; runs of earlier versions have none.
        place: address of its artifacts, which has been checked.
    """

    run: str
    status: str = "RUNNING"
    end: int | None = None
    last: int = 0
    params: frozenset[str] = frozenset()
    inputs: bool = False
    results: dict[str, str] = field(default_factory=dict)
    parent: str = ""
    row: str = ""
    name: str = ""
    sent: set[int] = field(default_factory=set)
    marked: bool = True
    place: str = ""


class Runs:
    """The runs of one plan.

    Args:
        client: an ``MlflowClient``.
        state: state of the study, with a plan; kept up to date.
        artifacts: the store's artifacts.
        folder: folder of the study, with the profiles of its trials.

    Raises:
        PlaceError: the store's artifact address is not allowed
            (:meth:`study.tracking.artifacts.Artifacts.check`).
    """

    def __init__(self, client: Any, state: StudyState, artifacts: Artifacts, folder: Path) -> None:
        self._client, self._state, self._folder = client, state, folder
        self._artifacts = artifacts
        self.plan = plan = state.plan
        self._name = plan["study"]["name"]
        self._first = state.config.primary_metric.name
        self._key = str(plan["ledger"])
        self._artifacts.follow()
        self._experiment = self._ensure_experiment()
        self._known = self._runs_of_ledger()
        self._parent = self._ensure_parent()
        self._attach_to_parent()

    @property
    def parent_ids(self) -> tuple[str, str]:
        """Ids of the experiment and of the parent run."""
        return self._experiment, self._parent

    def run_ids(self) -> dict[str, str]:
        """Return the run ids of the trials that have a run, by trial id."""
        return {
            key.partition("/")[2]: known.run for key, known in self._known.items() if "/" in key
        }

    def push(self, trial: TrialState) -> None:
        """Send all data that a trial's run lacks, including its end if the trial has ended."""
        known = self._ensure_run(trial)
        self._rename(known, trial)
        if self._is_complete(known, trial):
            return
        if known.status != "RUNNING":
            self._client.update_run(known.run, status="RUNNING")
            known.status = "RUNNING"
        fresh = {
            epoch: event
            for epoch, event in sorted(trial.reports.items())
            if epoch not in known.sent and epoch >= known.last
        }
        metrics = [
            metric
            for epoch, event in fresh.items()
            for metric in report_metrics(epoch, event, self._first)
        ]
        metrics += end_metrics(trial)
        params = [
            (name, value)
            for name, value in params_of(trial.config).items()
            if name not in known.params
        ]
        self._log(known.run, metrics, params, {MARK_TAG: self._state.latest})
        self._tag(known, trial, fresh)
        known.params |= {name for name, _ in params}
        known.sent |= set(fresh)
        self._log_inputs(known, trial)
        if trial.status in ENDED:
            for profile in profiles(self._folder, trial):
                files = [file for file in regular_files(profile) if TRACE.fullmatch(file.name)]
                self._put(known, files, PROFILE)
            self._end(known, MLFLOW_STATUS[trial.status], trial.ended)

    def forget(self, trial: TrialState) -> None:
        """Forget which points of a trial were sent, so that the next :meth:`push` sends them
        all."""
        known = self._known.get(f"{self._key}/{trial.id}")
        if known is not None:
            self._known[f"{self._key}/{trial.id}"] = _Known(
                run=known.run,
                status=known.status,
                params=known.params,
                results=known.results,
                parent=known.parent,
                row=known.row,
                name=known.name,
                marked=known.marked,
                place=known.place,
            )

    def replace(self, trial: TrialState) -> None:
        """Replace a trial's run by a new one with the same user tags; delete the old run at the
        end.

        An old run without a mark is kept, because it may belong to another copy of the study. The
        new run is created with the tags, so they survive if this process is killed; the next
        process then keeps one of the two runs and completes it.
        """
        old = self._known.pop(f"{self._key}/{trial.id}", None)
        if old is not None:
            self._ensure_run(trial, _tags_of_users(self._client.get_run(old.run)))
        self.push(trial)
        self.settle(trial)
        if old is not None and old.marked:
            self._client.delete_run(old.run)

    def settle(self, trial: TrialState) -> None:
        """Close the run of a trial that has not ended because the study was interrupted."""
        known = self._known.get(f"{self._key}/{trial.id}")
        if known is not None and known.status == "RUNNING":
            self._end(known, "KILLED", trial.last_heard or trial.started)

    def finish(self, state: StudyState, report: Path | None) -> None:
        """Send the report, each row's mean and spread, the claims' verdicts and the best models,
        and close the parent run.

        Args:
            state: state of the study.
            report: folder of the newly written report, or None. Only the report's own files are
                sent; other files and links are ignored.
        """
        time_ = max((trial.ended or 0.0 for trial in state.trials), default=0.0)
        figures = list(self._new_figures(state, time_))
        self._log(self._parent, figures, tags={MARK_TAG: state.latest})
        if report is not None and report.exists():
            self._log(self._parent, [], tags=claim_tags(read_record(report)))
            files = [
                file
                for file in regular_files(report)
                if file.name in SENT or PICTURE.fullmatch(file.name)
            ]
            self._put(self._known[self._key], files, "report")
        storage = self._folder.parent
        log_models(self._client, self._artifacts, self._experiment, state, self.run_ids(), storage)
        outcome = {"finished": "FINISHED", "failed": "FAILED"}.get(state.outcome, "KILLED")
        self._end(self._known[self._key], outcome, time_ or None)

    def describe(self, view: str) -> None:
        """Save the experiment's view, and send the parent run's config, plan and environment.

        Called once per plan.
        """
        name, value = view_tag(self.plan, view)
        self._client.set_experiment_tag(self._experiment, name, value)
        self._client.set_experiment_tag(self._experiment, KIND_TAG, "custom_model_development")
        parent = self._known[self._key]
        self._artifacts.put_texts(parent.place, f"run {parent.run}", documents_of(self.plan))

    # ----------------------------------------------------------------------------------------------

    def _put(self, known: _Known, files: Sequence[Path], folder: str) -> None:
        self._artifacts.put(known.place, f"run {known.run}", files, folder)

    def _ensure_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._name)
        if found is None:
            artifacts = self._artifacts.for_experiments
            location = (artifacts / re.sub(r"\W+", "-", self._name)).as_uri() if artifacts else None
            return str(self._client.create_experiment(self._name, artifact_location=location))
        self._artifacts.check(found.artifact_location, f"experiment {self._name!r}")
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _ensure_parent(self) -> str:
        known = self._known.get(self._key)
        if known is None:
            known = self._known[self._key] = self._make(
                self._key, self._name, self.plan["time"], parent_tags(self.plan)
            )
        else:
            self._log(known.run, [], tags={MARK_TAG: self._state.latest})
            if known.status != "RUNNING":
                self._client.update_run(known.run, status="RUNNING")
                known.status = "RUNNING"
        return known.run

    def _attach_to_parent(self) -> None:
        """Set the parent of every trial's run, because an earlier parent may have been deleted."""
        for key, known in self._known.items():
            if "/" in key and known.parent != self._parent:
                self._client.set_tag(known.run, PARENT_TAG, self._parent)
                known.parent = self._parent

    def _runs_of_ledger(self) -> dict[str, _Known]:
        """Return the store's content for every run of this ledger, by key.

        Deletes twins, except the oldest.
        """
        found, twins = own_runs(self._client, self._experiment, self._state)
        for run in found.values():
            self._artifacts.check(run.info.artifact_uri, f"run {run.info.run_id}")
        for run in twins:
            self._client.delete_run(run.info.run_id)
        return {key: _known(run) for key, run in found.items()}

    def _ensure_run(self, trial: TrialState, theirs: Mapping[str, str] | None = None) -> _Known:
        """Return a trial's run; if it does not exist, make it, with additional tags ``theirs``."""
        key = f"{self._key}/{trial.id}"
        if key not in self._known:
            tags = {**(theirs or {}), **trial_tags(trial, self.plan), PARENT_TAG: self._parent}
            self._known[key] = self._make(
                key, name_of(trial), trial.started or self.plan["time"], tags
            )
        return self._known[key]

    def _make(self, key: str, name: str, started: float, tags: Mapping[str, str]) -> _Known:
        """Make a run.

        If the reply is lost, the run may exist already. A retry must therefore look it up first, by
        making a new :class:`Runs`.
        """
        run = self._client.create_run(
            self._experiment,
            start_time=int(started * 1000),
            tags={KEY_TAG: key, MARK_TAG: self._state.latest, **tags},
            run_name=name,
        )
        place = run.info.artifact_uri
        self._artifacts.check(place, f"run {run.info.run_id}")
        parent, row = tags.get(PARENT_TAG, ""), tags.get("row", "")
        return _Known(run=run.info.run_id, parent=parent, row=row, name=name, place=place)

    # ----------------------------------------------------------------------------------------------

    def _new_figures(self, state: StudyState, time_: float) -> Iterator[Any]:
        """Yield the row metrics that are new or changed in comparison with the parent run.

        A changed value gets a later timestamp than the value that it replaces, even if the trials
        that ended last were removed from the study since.
        """
        had = {metric.key: metric for metric in latest_metrics(self._client.get_run(self._parent))}
        for name, value in row_figures(state).items():
            for metric in metrics_of({name: value}, 0, time_):
                old = had.get(metric.key)
                if old is None:
                    yield metric
                elif point_of(old)[3] != point_of(metric)[3]:
                    later = max(time_, old.timestamp / 1000 + LATER)
                    yield from metrics_of({name: value}, 0, later)

    def _rename(self, known: _Known, trial: TrialState) -> None:
        """Update the row label in a run's tags and name if the row was renamed since.

        A name that a user gave to the run is kept.
        """
        if known.row == trial.row:
            return
        self._log(known.run, [], tags={"row": trial.row})
        if known.name.startswith(known.row):
            self._client.update_run(known.run, name=name_of(trial))
            known.name = name_of(trial)
        known.row = trial.row

    def _is_complete(self, known: _Known, trial: TrialState) -> bool:
        """Return whether the run has the trial's end, which is sent last, so that it is
        complete."""
        if trial.status not in ENDED or trial.ended is None:
            return False
        return known.status == MLFLOW_STATUS[trial.status] and known.end == int(trial.ended * 1000)

    def _end(self, known: _Known, status: str, ended: float | None) -> None:
        end = int((ended or time.time()) * 1000)
        self._client.set_terminated(known.run, status, end_time=end)
        known.status, known.end = status, end

    def _tag(self, known: _Known, trial: TrialState, fresh: Mapping[int, Report]) -> None:
        """Set the tags about the trial's end and its infinite metrics.

        Tags about an earlier end, before a retry, are removed.
        """
        infinite = any(
            math.isinf(value) for event in fresh.values() for value in event["metrics"].values()
        )
        tags = expected_tags(trial) if infinite or trial.status in ENDED else {}
        self._log(
            known.run,
            [],
            tags={name: value for name, value in tags.items() if known.results.get(name) != value},
        )
        for name in known.results.keys() - tags.keys():
            self._client.delete_tag(known.run, name)
        known.results = {name: value for name, value in tags.items() if name in RESULT_TAGS}

    def _log_inputs(self, known: _Known, trial: TrialState) -> None:
        datasets = [] if known.inputs else list(datasets_of(self.plan, trial))
        if datasets:
            self._client.log_inputs(known.run, datasets=datasets)
        known.inputs = True

    def _log(
        self,
        run: str,
        metrics: list[Any],
        params: Sequence[tuple[str, str]] = (),
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log in requests of a thousand entries, with a hundred params and a hundred tags each."""
        from mlflow.entities import Param, RunTag

        params_ = [Param(name, value) for name, value in params]
        tags_ = [RunTag(name, value) for name, value in (tags or {}).items()]
        while metrics or params_ or tags_:
            first = (params_[:MOST_TAGS], tags_[:MOST_TAGS])
            room = BATCH - len(first[0]) - len(first[1])
            self._client.log_batch(run, metrics=metrics[:room], params=first[0], tags=first[1])
            metrics, params_, tags_ = metrics[room:], params_[MOST_TAGS:], tags_[MOST_TAGS:]


def runs_with_key(client: Any, experiment: str, key: str) -> Iterator[Any]:
    """Yield every run of a ledger, parent and children, oldest first; one request per thousand."""
    for condition in (f"= '{key}'", f"LIKE '{key}/%'"):
        token = None
        while True:
            page = client.search_runs(
                [experiment],
                f"tags.`{KEY_TAG}` {condition}",
                max_results=BATCH,
                order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                break


def own_runs(client: Any, experiment: str, state: StudyState) -> tuple[dict[str, Any], list[Any]]:
    """Return the runs of a study's ledger by key, and their twins (duplicates after a lost reply).

    Runs of another copy of the ledger are left out: runs with its marks, and children of its parent
    run. Of several parent runs with our marks, the one updated last is ours; the others were made
    by copies that had read fewer events. A run without a mark, from an earlier version, is used if
    it is the only one, and never counts as a twin.
    """
    key = str(state.plan["ledger"])
    runs = list(runs_with_key(client, experiment, key))
    own = [run for run in runs if state.is_own(run.data.tags.get(MARK_TAG, state.latest))]
    own.sort(key=_moment, reverse=True)
    have_children = {run.data.tags.get(PARENT_TAG) for run in runs}
    parents = [run for run in own if run.data.tags[KEY_TAG] == key]
    parents.sort(key=lambda run: (-_moment(run), run.info.run_id not in have_children))
    others = {run.info.run_id for run in runs if run.data.tags[KEY_TAG] == key}
    others -= {run.info.run_id for run in parents[:1]}
    children = [
        run
        for run in own
        if run.data.tags[KEY_TAG] != key and run.data.tags.get(PARENT_TAG) not in others
    ]
    found: dict[str, Any] = {}
    for run in [*parents[:1], *children]:
        found.setdefault(run.data.tags[KEY_TAG], run)
    twins = [run for run in parents[1:] if run.info.run_id not in have_children]
    twins += [run for run in children if run is not found[run.data.tags[KEY_TAG]]]
    return found, [run for run in twins if MARK_TAG in run.data.tags]


def _moment(run: Any) -> float:
    """Return the time of a run's mark; -infinity for a run without a mark."""
    return float(run.data.tags.get(MARK_TAG) or -math.inf)


def _tags_of_users(run: Any) -> dict[str, str]:
    """Return the tags of a run that do not come from the ledger."""
    return {
        name: value
        for name, value in run.data.tags.items()
        if name not in (KEY_TAG, MARK_TAG, NAME_TAG, *RESULT_TAGS)
        and not name.startswith(NONFINITE)
    }


def _known(run: Any) -> _Known:
    metrics = latest_metrics(run)
    reported = [
        metric
        for metric in metrics
        if not (metric.key == SECONDS or metric.key.startswith("test/"))
        and not is_old_setting(metric.key)
    ]
    return _Known(
        run=run.info.run_id, status=run.info.status, end=run.info.end_time,
        last=max((metric.step for metric in reported), default=0),
        params=frozenset(run.data.params),
        inputs=bool(run.inputs and run.inputs.dataset_inputs),
        results={name: run.data.tags[name] for name in RESULT_TAGS if name in run.data.tags},
        parent=run.data.tags.get(PARENT_TAG, ""), row=run.data.tags.get("row", ""),
        name=run.info.run_name or "", marked=MARK_TAG in run.data.tags,
        place=run.info.artifact_uri,
    )  # fmt: skip
