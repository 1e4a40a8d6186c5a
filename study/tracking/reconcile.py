"""Reconciliation of an MLflow store with a ledger: runs, metric points, params and statuses.

An audit reads everything back from the store and compares it with the ledger in both directions.
Missing data are sent. MLflow cannot remove single points or params, so a run with a point or param
that the ledger lacks is replaced: a new run is made, with the tags and the note that users gave to
the old run, and the old run is deleted. Runs that belong to no trial of the ledger, and duplicates,
are deleted. Then everything is read and compared again.

After a study was copied, each copy has its own runs, and the other copy's runs are neither compared
nor deleted. Runs of earlier versions, which did not record their ledger, are not deleted either; a
wrong one gets a correct one beside it.

The comparison ignores params and metrics with other names, which users logged, and params that are
not part of a trial's identity (the data's folder, the GPU share, changes after running out of
memory). Deleted runs are hidden by MLflow until ``mlflow gc`` removes them.

Cost: one request per thousand runs, and one per metric and hundred runs for the metrics' histories.
The latter is the bulk request of MLflow's own pages (internal to MLflow 3.17; ``pyproject.toml``
pins the version).
"""

from __future__ import annotations

import http
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from study._compat import tracking_store
from study.ledger.log import Follower
from study.ledger.state import ENDED, StudyState, TrialState, fold
from study.program import lns_study
from study.tracking.artifacts import Artifacts
from study.tracking.mlflow_runs import Runs, own_runs
from study.tracking.names import BITS, SECONDS, is_old_setting, sanitise
from study.tracking.payload import (
    MARK_TAG,
    MLFLOW_STATUS,
    PARENT_TAG,
    RESULT_TAGS,
    comparable_params,
    expected_points,
    expected_tags,
    may_differ,
    params_of,
    point_of,
)
from study.tracking.view import view_key
from study.tracking.writer import connect, tracking_lock

READERS = 8
SHOWN = 3
RUNS = 100
MOST_POINTS = 25_000
"""Maximum number of points in one answer, a limit of MLflow's server.

``RUNS`` is the maximum number of runs in one request.
"""

BULK = "/ajax-api/2.0/mlflow/metrics/get-history-bulk"

Point: TypeAlias = tuple[str, int, int, float | None]
_Entry: TypeAlias = tuple[TrialState, tuple[int, int, int], list[str], list[str]]
"""A trial; numbers of compared runs, points and params; missing data; wrong data."""


@dataclass(kw_only=True)
class Audit:
    """Comparison of a store with a ledger.

    Attributes:
        runs, points, params: numbers of runs, points and params compared.
        missing: descriptions of data that only the ledger has, by trial id.
        false: descriptions of data that only the store has, by trial id.
        strangers: ids of runs that belong to no trial, or are duplicates.
    """

    runs: int = 0
    points: int = 0
    params: int = 0
    missing: dict[str, list[str]] = field(default_factory=dict)
    false: dict[str, list[str]] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether the store has exactly what the ledger has."""
        return not (self.missing or self.false or self.strangers)

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {self.points} points, {self.params} params compared:"
            f" {'equal' if self.equal else 'NOT equal'}"
        )

    def differences(self) -> Iterator[str]:
        """Yield the differences, one per line; for each trial the first few."""
        for title, found in (("lacks", self.missing), ("has, and the ledger has not,", self.false)):
            for trial, entries in found.items():
                more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
                yield f"trial {trial}: MLflow {title} {'; '.join(entries[:SHOWN])}{more}"
        for run in self.strangers:
            yield f"run {run}: belongs to no trial of the ledger, or to one that has a run already"


def reconcile(
    folder: Path,
    uri: str,
    artifacts: Path,
    *,
    repair: bool = True,
    delete: bool = True,
    report: Callable[[Path], Path | None] = lambda folder: None,
) -> tuple[Audit, Audit]:
    """Compare a store with the ledger in ``folder``, repair it, compare again.

    Args:
        folder: folder of the study.
        uri: MLflow tracking URI.
        artifacts: the storage's folder for artifacts.
        repair: whether to change the store.
        delete: whether to delete runs; if not, missing data are still sent.
        report: writes the report of the study in the given folder and returns the report's folder,
            or None for no report. Called only if something is sent.

    Returns:
        The audits before and after; the same one twice if nothing was changed.

    Raises:
        ValueError: the ledger has no plan, or another process is sending it.
    """
    with tracking_lock(folder, patience=0.0) as free:
        if not free:
            raise ValueError(
                f"{folder}: another process sends this ledger to MLflow at the moment; wait until"
                " the study has ended"
            )
        state = fold(Follower(folder).poll())
        if not state.plan:
            raise ValueError(
                f"{folder}: its ledger holds no plan; run the study first with"
                f" `{lns_study('run', 'CONFIG')}`"
            )
        client = connect(uri)
        before = audit(client, state)
        if before.equal or not repair or not (delete or before.missing):
            return before, before
        _repair(client, state, before, Artifacts(uri, artifacts), folder, delete, report)
        return before, audit(client, state)


def audit(client: Any, state: StudyState) -> Audit:
    """Read all data of a study from a store and compare them with the ledger."""
    found = Audit()
    experiment = client.get_experiment_by_name(state.config.name)
    runs: dict[str, Any] = {}
    if experiment is not None and experiment.lifecycle_stage == "active":
        own, twins = own_runs(client, experiment.experiment_id, state)
        runs = {key.partition("/")[2]: run for key, run in own.items()}
        unknown = [runs.pop(name) for name in runs.keys() - state.known.keys() - {""}]
        strangers = [*twins, *(run for run in unknown if MARK_TAG in run.data.tags)]
        found.strangers = sorted(run.info.run_id for run in strangers)
    if "" not in runs:
        found.missing["(study)"] = ["its parent run"]
    elif runs[""].info.status == "RUNNING":
        found.false["(study)"] = ["a parent run that is RUNNING"]
    parent = runs[""].info.run_id if "" in runs else ""
    trials = [trial for trial in state.known.values() if has_run(trial) or trial.id in runs]
    pairs = [(trial, runs[trial.id]) for trial in trials if trial.id in runs]
    found.missing |= {trial.id: ["its run"] for trial in trials if trial.id not in runs}
    with ThreadPoolExecutor(READERS) as pool:
        for entries in pool.map(
            lambda some: _compare(client, some, state, parent), _in_groups(pairs, RUNS)
        ):
            for entry in entries:
                _enter(found, *entry)
    return found


def has_run(trial: TrialState) -> bool:
    """Return whether a trial has started, so that it must have a run in MLflow."""
    return bool(trial.reports or trial.started or trial.status in ENDED)


def _enter(
    found: Audit,
    trial: TrialState,
    counts: tuple[int, int, int],
    missing: list[str],
    false: list[str],
) -> None:
    found.runs, found.points, found.params = (
        a + b for a, b in zip((found.runs, found.points, found.params), counts, strict=True)
    )
    if missing:
        found.missing[trial.id] = missing
    if false:
        found.false[trial.id] = false


def _compare(
    client: Any, pairs: Sequence[tuple[TrialState, Any]], state: StudyState, parent: str
) -> list[_Entry]:
    """Compare some trials with their runs."""
    wanted = {run.info.run_id: expected_points(trial) for trial, run in pairs}
    ours = _metric_names(state)
    names = {
        run.info.run_id: (
            {name for name, *_ in wanted[run.info.run_id]}
            | {name for name in run.data.metrics if _is_ours(name, ours)}
        )
        for trial, run in pairs
    }
    have = _histories(client, names)
    entries = []
    for trial, run in pairs:
        points = have[run.info.run_id]
        missing, false = _compare_points(wanted[run.info.run_id], points)
        params = comparable_params(trial, params_of(trial.config))
        stored = comparable_params(trial, run.data.params)
        earlier = {BITS} & run.data.metrics.keys()
        missing += [f"param {name}" for name in params if name not in stored.keys() | earlier]
        wrong = [
            name
            for name in params
            if name not in may_differ(trial) and stored.get(name, params[name]) != params[name]
        ]
        false += [f"param {name} = {run.data.params[name]}" for name in wrong]
        missing += _compare_tags(trial, run, parent)
        entries.append((trial, (1, len(points), len(run.data.params)), missing, false))
    return entries


def _metric_names(state: StudyState) -> set[str]:
    """Return the names of the metrics that the study's trials report, including at their end."""
    trials = state.known.values()
    names = {name for trial in trials for name in trial.test}
    for trial in trials:
        names.update(*(event["metrics"] for event in trial.reports.values()))
    return {sanitise(name) for name in names}


def _is_ours(name: str, reported: set[str]) -> bool:
    ours = name in reported or name == SECONDS or name.startswith("test/")
    return ours and not is_old_setting(name)


def _compare_points(wanted: set[Point], points: Sequence[Point]) -> tuple[list[str], list[str]]:
    """Return descriptions of the missing points, and of the wrong or duplicate ones."""
    found = Counter(points)
    missing = [f"{name} at step {step}" for name, step, *_ in sorted(wanted - set(found), key=str)]
    false = [
        f"{name} = {value} at step {step}"
        for name, step, _, value in sorted(set(found) - wanted, key=str)
    ]
    twice = found.total() - len(found)
    return missing, false + ([f"{twice} points twice"] if twice else [])


def _compare_tags(trial: TrialState, run: Any, parent: str) -> list[str]:
    """Return descriptions of differences in a run's status, tags and parent run."""
    tags, wanted = run.data.tags, expected_tags(trial) | {"row": trial.row}
    status = MLFLOW_STATUS[trial.status] if trial.status in ENDED else "KILLED"
    missing = [f"its end ({status}; it is {run.info.status})"] if run.info.status != status else []
    missing += [
        f"the tag {name} = {value[:40]}"
        for name, value in wanted.items()
        if tags.get(name) != value
    ]
    missing += [
        f"an end without the tag {name}"
        for name in RESULT_TAGS
        if name in tags and name not in wanted
    ]
    return missing + (["its place under the parent run"] if tags.get(PARENT_TAG) != parent else [])


def _histories(client: Any, names: Mapping[str, set[str]]) -> dict[str, list[Point]]:
    """Return every point of the metrics ``names``, by run."""
    found: dict[str, list[Point]] = {run: [] for run in names}
    for name in sorted(set().union(*names.values())):
        runs = [run for run in names if name in names[run]]
        for run, point in _history(client, runs, name):
            found[run].append(point)
    return found


def _history(client: Any, runs: list[str], name: str) -> Iterator[tuple[str, Point]]:
    """Yield the points of one metric in several runs.

    Falls back to one request per run if the bulk request fails or its answer may be truncated.
    """
    from mlflow.utils.rest_utils import http_request

    store = tracking_store(client)
    metrics: list[dict[str, Any]] | None
    if hasattr(store, "get_metric_history_bulk"):
        metrics = [
            metric.to_dict() for metric in store.get_metric_history_bulk(runs, name, MOST_POINTS)
        ]
    else:
        query = [
            *(("run_id", run) for run in runs),
            ("metric_key", name),
            ("max_results", str(MOST_POINTS)),
        ]
        answer = http_request(store.get_host_creds(), BULK, "GET", params=query)
        # not answer.json(): if simplejson is installed, it rejects NaN
        ok = answer.status_code == http.HTTPStatus.OK
        metrics = json.loads(answer.text)["metrics"] if ok else None
    if metrics is not None and len(metrics) < MOST_POINTS:
        yield from ((entry["run_id"], _point(**entry)) for entry in metrics)
    else:
        yield from (
            (run, point_of(metric))
            for run in runs
            for metric in client.get_metric_history(run, name)
        )


def _point(key: str, value: float, timestamp: int, step: int, **_: Any) -> Point:
    return key, int(step), int(timestamp), None if math.isnan(value) else float(value)


def _in_groups(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _repair(
    client: Any,
    state: StudyState,
    before: Audit,
    artifacts: Artifacts,
    folder: Path,
    delete: bool,
    report: Callable[[Path], Path | None],
) -> None:
    for run in before.strangers if delete else []:
        client.delete_run(run)
    runs = Runs(client, state, artifacts, folder)
    false = before.false.keys() & state.known.keys() if delete else set()
    for id_ in sorted(false):
        runs.replace(state.known[id_])
    for id_ in sorted((before.missing.keys() & state.known.keys()) - false):
        runs.forget(state.known[id_])
        runs.push(state.known[id_])
    for trial in state.known.values():
        runs.settle(trial)
    runs.describe(view_key(state.plan))
    runs.finish(state, report(folder))
