"""Evidence of a study's trials beside its ledger: from their checkpoints, and from their MLflow
runs.

:mod:`study.manage.repair` restores a damaged ledger from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.ledger.lines import Event
from study.ledger.state import FAILED, FINISHED, STOPPED
from study.manage.checkpoints import checkpoints_of
from study.tracking.names import sanitise
from study.tracking.payload import KEY_TAG
from study.tracking.runs import runs_with_key
from study.tracking.supervisor import check_tracking
from study.tracking.writer import connect

ENDS = (FINISHED, STOPPED, FAILED)
"""Events that end a trial."""
CHECKPOINT, MLFLOW = "checkpoint", "mlflow"


@dataclass(kw_only=True)
class Known:
    """Evidence of one trial beside the ledger.

    Attributes:
        source: where the evidence comes from.
        epochs: metrics by epoch.
        times: time of each epoch's report in seconds since 1970, as far as known.
        end: event of the trial's end, without trial and time; None if unknown.
        ended: time of the end; None if unknown.
        paths: its checkpoints, by epoch.
        origin: origin that its checkpoints carry.
        config: config that its checkpoints carry.
    """

    source: str = ""
    epochs: dict[int, dict[str, float]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    end: Event | None = None
    ended: float | None = None
    paths: dict[int, Path] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def known_to_checkpoints(folder: Path) -> dict[str, Known]:
    """Return the evidence of the checkpoints in a study's folder, by trial."""
    found: dict[str, Known] = {}
    for trial, path, state in checkpoints_of(folder):
        entry = found.setdefault(trial, Known(source=CHECKPOINT))
        entry.paths.setdefault(int(state["epoch"]), path)
        if entry.config:
            continue  # an older checkpoint
        entry.config, entry.origin = state.get("config", {}), state.get("origin", {})
        entry.epochs = {
            int(metrics["epoch"]): _numbers(metrics) for metrics in state.get("history", [])
        }
        if state.get("tested"):
            entry.end = {
                "event": FINISHED,
                "metrics": {name: float(value) for name, value in state["tested"].items()},
            }
            if state.get("returned"):
                entry.end["epochs"] = int(state["epoch"])
    return found


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the part of an epoch's metrics that a report has."""
    return {name: float(value) for name, value in metrics.items() if name != "epoch"}


def add_known_to_mlflow(
    known: dict[str, Known], name: str, id_: str, uri: str, names: set[str]
) -> None:
    """Add the evidence of an MLflow store: times, and figures where no checkpoint has them.

    Args:
        known: evidence by trial, added to.
        name: name of the experiment.
        id_: id of the ledger.
        uri: tracking URI of the store.
        names: names of the study's metrics.

    Raises:
        ValueError: the store does not answer.
    """
    check_tracking(uri)
    client = connect(uri)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return
    plain = {sanitise(name): name for name in names}
    for run in runs_with_key(client, experiment.experiment_id, id_):
        trial = run.data.tags[KEY_TAG].partition("/")[2]
        if trial:
            _merge(known.setdefault(trial, Known(source=MLFLOW)), _known_to_run(client, run, plain))


def _known_to_run(client: Any, run: Any, plain: dict[str, str]) -> Known:
    found = Known(source=MLFLOW)
    test: dict[str, float] = {}
    for key in set(run.data.metrics) & set(plain):
        for metric in client.get_metric_history(run.info.run_id, key):
            if plain[key].startswith("test/"):
                test[plain[key]] = metric.value
            else:
                found.epochs.setdefault(metric.step, {})[plain[key]] = metric.value
                # MLflow cut the ledger's time to milliseconds
                found.times[metric.step] = (metric.timestamp + 0.5) / 1000
    names = {name for values in found.epochs.values() for name in values}
    # MLflow lacks infinite metrics, so an epoch with one is incomplete
    found.epochs = {step: values for step, values in found.epochs.items() if set(values) == names}
    status = run.data.tags.get("status", "")
    if status in ENDS and run.info.end_time:
        found.end, found.ended = _end(status, test, run.data.tags), (run.info.end_time + 0.5) / 1000
    return found


def _end(status: str, test: dict[str, float], tags: dict[str, str]) -> Event | None:
    if status == FINISHED:
        return {"event": FINISHED, "metrics": test} if test else None
    return (
        {"event": STOPPED, "by": tags.get("stopped_by", "")}
        if status == STOPPED
        else {"event": FAILED, "error": tags.get("error", "")}
    )


def _merge(entry: Known, other: Known) -> None:
    """Add to ``entry`` what it lacks; figures of a checkpoint take precedence over MLflow's."""
    entry.epochs = other.epochs | entry.epochs
    entry.times, entry.ended, entry.end = other.times, other.ended, entry.end or other.end
