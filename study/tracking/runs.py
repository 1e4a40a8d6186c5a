"""One ledger's runs in one MLflow store, by methods that may be repeated: after a lost reply, by
another process, years later.

What makes them repeatable: a run is looked up by its tag ``lns_study.key`` before it is made
(``create_run`` is not idempotent; of twins that a lost reply left, all but the oldest are deleted).
Copies of a ledger have one id, so runs have a mark of the ledger that they were sent from as well
(:meth:`~study.ledger.state.StudyState.is_own`): what another copy sent since it was made is not
looked up, changed or deleted (:func:`own_runs`).
A metric with the same run, key, step, value and timestamp is the same row in MLflow, and timestamps
are the ledger's. The store itself is the cursor: the last step of a run says which epochs it lacks,
so a database that was swapped or set back is completed as well.

Layout: one experiment per study; one parent run per ledger with config, plan, environment and
report; one child run per trial with params, tags, data sets, metrics. A study extended by seeds or
rows keeps its runs: keys are made of the ledger's id and the trial's, not of the plan. Requests:
five per trial (make, params and metrics, tags of its end, data set, end), one per file of its
profile, and one per batch of later reports.
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
from study.claims.record import FILE, read_record
from study.ledger.lines import Event
from study.ledger.state import ENDED, StudyState, TrialState, name_of
from study.tracking.artifacts import Artifacts
from study.tracking.models import log_models
from study.tracking.names import NONFINITE, SETTING
from study.tracking.payload import (
    KEY_TAG,
    KIND_TAG,
    LATER,
    MARK_TAG,
    MLFLOW_STATUS,
    PARENT_TAG,
    PROFILE,
    RESULT_TAGS,
    SECONDS,
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
    settings_metrics,
    trial_tags,
)
from study.tracking.view import view_tag
from trainers.files import regular_files

BATCH = 1000
MOST_TAGS = 100
NAME_TAG = "mlflow.runName"
SENT = ("report.html", "report.md", FILE, "configurations.csv")
"""Files of a report that are sent, beside pictures (:data:`PICTURE`)."""
PICTURE = re.compile(r"[a-z][a-z_]*\.png")
TRACE = re.compile(r"rank-?\d+\.(json|json\.gz|txt)")
"""Files of a profile that are sent."""


@dataclass(kw_only=True)
class _Known:
    """What the store has of one run.

    Attributes:
        run: id of the run.
        status: MLflow's status of the run.
        end: time of its end in milliseconds since 1970; None before.
        last: last epoch with a metric; that epoch may be incomplete.
        params: names of its params.
        settings: whether it has the settings as metrics.
        inputs: whether it has its data set.
        results: its tags about the trial's end.
        parent: id of the run under which it is shown.
        row, name: label of the trial's row when it was sent, and the run's name.
        sent: epochs sent by this process.
        marked: whether it says which ledger it was sent from; earlier versions did not note that.
        place: address of its artifacts, which has been checked.
    """

    run: str
    status: str = "RUNNING"
    end: int | None = None
    last: int = 0
    params: frozenset[str] = frozenset()
    settings: bool = False
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
        PlaceError: the store names a place for artifacts that is neither the storage's nor the
            named server's; nothing was written.
    """

    def __init__(self, client: Any, state: StudyState, artifacts: Artifacts, folder: Path) -> None:
        self._client, self._state, self._folder = client, state, folder
        self._artifacts = artifacts
        self.plan = plan = state.plan
        self._name = plan["study"]["name"]
        self._key = str(plan["ledger"])
        self._artifacts.follow()
        self._experiment = self._ensure_experiment()
        self._known = self._runs_of_ledger()
        self._parent = self._ensure_parent()
        self._attach_to_parent()

    @property
    def parent_ids(self) -> tuple[str, str]:
        """Id of the experiment and id of the parent run."""
        return self._experiment, self._parent

    def run_ids(self) -> dict[str, str]:
        """Return the run id of every trial that the store knows, by trial id."""
        return {
            key.partition("/")[2]: known.run for key, known in self._known.items() if "/" in key
        }

    def push(self, trial: TrialState) -> None:
        """Send what the run of a trial lacks, and its end if it has ended."""
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
        metrics = [] if known.settings else list(settings_metrics(trial, self.plan))
        metrics += [
            metric for epoch, event in fresh.items() for metric in report_metrics(epoch, event)
        ]
        metrics += end_metrics(trial)
        params = [
            (name, value) for name, value in params_of(trial.config) if name not in known.params
        ]
        self._log(known.run, metrics, params, {MARK_TAG: self._state.latest})
        self._tag(known, trial, fresh)
        known.params, known.settings = known.params | {name for name, _ in params}, True
        known.sent |= set(fresh)
        self._log_inputs(known, trial)
        if trial.status in ENDED:
            for profile in profiles(self._folder, trial):
                files = [file for file in regular_files(profile) if TRACE.fullmatch(file.name)]
                self._put(known, files, PROFILE)
            self._end(known, MLFLOW_STATUS[trial.status], trial.ended)

    def forget(self, trial: TrialState) -> None:
        """Forget which points the store has of a trial: the next :meth:`push` sends all of them."""
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
        """Make the run of a trial again, with the tags that users gave it, and delete the one there
        was once it is complete; one without a mark, which may be another copy's, stays.

        The new run has those tags from its first moment. Whatever ends this process, a run with
        them is left, and of the two whoever looks next keeps either and completes it.
        """
        old = self._known.pop(f"{self._key}/{trial.id}", None)
        if old is not None:
            self._ensure_run(trial, _tags_of_users(self._client.get_run(old.run)))
        self.push(trial)
        self.settle(trial)
        if old is not None and old.marked:
            self._client.delete_run(old.run)

    def settle(self, trial: TrialState) -> None:
        """Close the run of a trial that stopped without an end: the study was interrupted."""
        known = self._known.get(f"{self._key}/{trial.id}")
        if known is not None and known.status == "RUNNING":
            self._end(known, "KILLED", trial.last_heard or trial.started)

    def finish(self, state: StudyState, report: Path | None) -> None:
        """Send the report, each row's mean and spread, the verdicts on claims, and the best models;
        close the parent.

        Args:
            state: state of the study.
            report: folder with the report that was just written; None for none. Files of other
                names, and links, stay there.
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
        """Give the experiment its saved view, and the parent run its config, plan and environment.

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
        """Show every trial's run under the parent's, also those whose parent was deleted."""
        for key, known in self._known.items():
            if "/" in key and known.parent != self._parent:
                self._client.set_tag(known.run, PARENT_TAG, self._parent)
                known.parent = self._parent

    def _runs_of_ledger(self) -> dict[str, _Known]:
        """Return what the store has of every run of this ledger, by key.

        Of twins the oldest is kept, the others are deleted.
        """
        found, twins = own_runs(self._client, self._experiment, self._state)
        for run in found.values():
            self._artifacts.check(run.info.artifact_uri, f"run {run.info.run_id}")
        for run in twins:
            self._client.delete_run(run.info.run_id)
        return {key: _known(run) for key, run in found.items()}

    def _ensure_run(self, trial: TrialState, theirs: Mapping[str, str] | None = None) -> _Known:
        """Return what is known of a trial's run; make one, with tags ``theirs`` too, if needed."""
        key = f"{self._key}/{trial.id}"
        if key not in self._known:
            tags = {**(theirs or {}), **trial_tags(trial, self.plan), PARENT_TAG: self._parent}
            self._known[key] = self._make(
                key, name_of(trial), trial.started or self.plan["time"], tags
            )
        return self._known[key]

    def _make(self, key: str, name: str, started: float, tags: Mapping[str, str]) -> _Known:
        """Make a run.

        After a lost reply it may exist already, so a repetition must look first (:class:`Runs` is
        made anew).
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
        """Yield the metrics of rows that the parent run has not, later than the values that they
        replace: rows and seeds that ended last may have been taken out since."""
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
        """Give a run the label of its trial's row, which may have another one since it was made; a
        name that a user gave it stays."""
        if known.row == trial.row:
            return
        self._log(known.run, [], tags={"row": trial.row})
        if known.name.startswith(known.row):
            self._client.update_run(known.run, name=name_of(trial))
            known.name = name_of(trial)
        known.row = trial.row

    def _is_complete(self, known: _Known, trial: TrialState) -> bool:
        """Tell whether the run ended as the trial did.

        The end is written last, so everything before it is there.
        """
        if trial.status not in ENDED or trial.ended is None:
            return False
        return known.status == MLFLOW_STATUS[trial.status] and known.end == int(trial.ended * 1000)

    def _end(self, known: _Known, status: str, ended: float | None) -> None:
        end = int((ended or time.time()) * 1000)
        self._client.set_terminated(known.run, status, end_time=end)
        known.status, known.end = status, end

    def _tag(self, known: _Known, trial: TrialState, fresh: Mapping[int, Event]) -> None:
        """Set the tags about the trial's end and its infinite metrics.

        Tags about an earlier end, before the trial was tried again, are removed.
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
    """Return the runs of a study's ledger by key, and the twins of these that a lost reply left.

    Runs that another copy of the ledger sent are left out: those with its marks, and the children
    of its parent run. Of several parent runs the one that was sent last is this ledger's: a copy
    that knows less made the others. A run of an earlier version, without a mark, is taken where
    there is no other, and is nobody's twin.
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
    """Return the time that a run's mark is of; that of a run without one is before all others."""
    return float(run.data.tags.get(MARK_TAG) or -math.inf)


def _tags_of_users(run: Any) -> dict[str, str]:
    """Return the tags of a run that a new one of the same trial does not get from the ledger."""
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
        if metric.key != SECONDS and not metric.key.startswith((SETTING, "test/"))
    ]
    return _Known(
        run=run.info.run_id, status=run.info.status, end=run.info.end_time,
        last=max((metric.step for metric in reported), default=0),
        params=frozenset(run.data.params),
        settings=any(metric.key.startswith(SETTING) for metric in metrics),
        inputs=bool(run.inputs and run.inputs.dataset_inputs),
        results={name: run.data.tags[name] for name in RESULT_TAGS if name in run.data.tags},
        parent=run.data.tags.get(PARENT_TAG, ""), row=run.data.tags.get("row", ""),
        name=run.info.run_name or "", marked=MARK_TAG in run.data.tags,
        place=run.info.artifact_uri,
    )  # fmt: skip
