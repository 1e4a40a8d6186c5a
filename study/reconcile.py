"""Make an MLflow store equal a ledger, and prove it: every run, every point of every metric, every param, every status.

An audit reads everything back from the store and compares it with what the ledger says, both ways: what is missing and what is too
much. What is missing is sent; a run that has something false (a point or param that the ledger does not have: MLflow can take
neither back) is deleted and made again; runs that belong to no trial of the ledger, and twins, are deleted. Then everything is read
and compared once more.

Deleting is MLflow's: such runs are hidden, ``mlflow gc`` removes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.ledger import Follower
from study.mlflow_runs import KEY_TAG, MLFLOW_STATUS, Runs, expected_params, expected_points, point_of, runs_with_key
from study.program import lns_study
from study.state import ENDED, StudyState, TrialState, fold
from study.ui import is_server
from study.writer import connect, tracking_lock

READERS = 8
SHOWN = 3


@dataclass(kw_only=True)
class Audit:
    """What a store has of a ledger.

    Attributes:
        runs, points, params: compared.
        missing: by trial id, what the store lacks, in words.
        false: by trial id, what the store has and the ledger has not.
        strangers: run ids that belong to no trial, or are twins.
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
        return f"{self.runs} runs, {self.points} points, {self.params} params compared: {'equal' if self.equal else 'NOT equal'}"

    def differences(self) -> Iterator[str]:
        """The differences, one a line; of a run the first few."""
        for title, found in (("lacks", self.missing), ("has, and the ledger has not,", self.false)):
            for trial, entries in found.items():
                more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
                yield f"trial {trial}: MLflow {title} {'; '.join(entries[:SHOWN])}{more}"
        for run in self.strangers:
            yield f"run {run}: belongs to no trial of the ledger, or to one that has a run already"


def reconcile(folder: Path, uri: str, artifacts: Path, *, repair: bool = True) -> tuple[Audit, Audit]:
    """Compare a store with the ledger in ``folder``, mend it, compare again.

    Returns:
        The audits before and after; the same one twice where nothing was to be mended, or nothing may be.

    Raises:
        ValueError: the ledger holds no plan, or another process sends it at the moment.
    """
    with tracking_lock(folder, patience=0.0) as free:
        if not free:
            raise ValueError(
                f"{folder}: another process sends this ledger to MLflow at the moment; wait until the study has ended"
            )
        state = fold(Follower(folder).poll())
        if not state.plan:
            raise ValueError(f"{folder}: its ledger holds no plan; run the study first with `{lns_study('run', 'CONFIG')}`")
        client = connect(uri)
        before = audit(client, state)
        if before.equal or not repair:
            return before, before
        _repair(client, state, before, None if is_server(uri) else artifacts, folder)
        return before, audit(client, state)


def audit(client: Any, state: StudyState) -> Audit:
    """Read everything that a store has of a study and compare."""
    found = Audit()
    experiment = client.get_experiment_by_name(state.config.name)
    key = str(state.plan["ledger"])
    runs: dict[str, Any] = {}
    if experiment is not None and experiment.lifecycle_stage == "active":
        for run in runs_with_key(client, experiment.experiment_id, key):
            name = run.data.tags[KEY_TAG].partition("/")[2]
            if name in runs or (name and name not in state.known):
                found.strangers.append(run.info.run_id)
            else:
                runs[name] = run
    if "" not in runs:
        found.missing["(study)"] = ["its parent run"]
    elif runs[""].info.status == "RUNNING":
        found.false["(study)"] = ["a parent run that is RUNNING"]
    with ThreadPoolExecutor(READERS) as pool:
        trials = [trial for trial in state.known.values() if has_run(trial) or trial.id in runs]
        for trial, entry in zip(trials, pool.map(lambda t: _compare(client, runs.get(t.id), t, state), trials), strict=True):
            _enter(found, trial, *entry)
    return found


def has_run(trial: TrialState) -> bool:
    """Whether a trial has begun, and so has a run in MLflow."""
    return bool(trial.reports or trial.started or trial.status in ENDED)


def _enter(found: Audit, trial: TrialState, counts: tuple[int, int, int], missing: list[str], false: list[str]) -> None:
    found.runs, found.points, found.params = (
        a + b for a, b in zip((found.runs, found.points, found.params), counts, strict=True)
    )
    if missing:
        found.missing[trial.id] = missing
    if false:
        found.false[trial.id] = false


def _compare(client: Any, run: Any, trial: TrialState, state: StudyState) -> tuple[tuple[int, int, int], list[str], list[str]]:
    """Runs, points and params compared, what is missing, what is false."""
    if run is None:
        return (0, 0, 0), ["its run"], []
    wanted = expected_points(trial, state.plan)
    names = {name for name, *_ in wanted} | set(run.data.metrics)
    have = [point_of(metric) for name in names for metric in client.get_metric_history(run.info.run_id, name)]
    missing = [f"{name} at step {step}" for name, step, *_ in sorted(wanted - set(have), key=str)]
    false = [f"{name} = {value} at step {step}" for name, step, _, value in sorted(set(have) - wanted, key=str)]
    if len(have) > len(set(have)):
        false.append(f"{len(have) - len(set(have))} points twice")
    params = expected_params(trial)
    missing += [f"param {name}" for name in params if name not in run.data.params]
    false += [f"param {name} = {value}" for name, value in run.data.params.items() if params.get(name) != value]
    status = MLFLOW_STATUS[trial.status] if trial.status in ENDED else "KILLED"
    if run.info.status != status:
        missing.append(f"its end ({status}; it is {run.info.status})")
    return (1, len(have), len(run.data.params)), missing, false


def _repair(client: Any, state: StudyState, before: Audit, artifacts: Path | None, folder: Path) -> None:
    for run in before.strangers:
        client.delete_run(run)
    runs = Runs(client, state.plan, artifacts, folder)
    known = runs.run_ids()
    for id_ in before.false:
        if id_ in known:
            client.delete_run(known[id_])
    runs = Runs(client, state.plan, artifacts, folder)
    for id_ in {**before.missing, **before.false}:
        if id_ in state.known:
            runs.forget(state.known[id_])
            runs.push(state.known[id_])
    for trial in state.known.values():
        runs.settle(trial)
    runs.finish(state, None)
