"""Evidence of a study's trials outside of its ledger: checkpoints and MLflow runs.

:mod:`study.ops.repair.ledger` restores a damaged ledger from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from study.config.metric import TEST
from study.ledger.events import End, Event, Finished
from study.ledger.state import FAILED, FINISHED, STOPPED
from study.plan.checkpoints import checkpoints_of
from study.tracking.mlflow_runs import runs_with_key
from study.tracking.names import NONFINITE, SECONDS, is_old_setting, restore, sanitise
from study.tracking.payload import KEY_TAG, MARK_TAG
from study.tracking.writer import connect
from study.tracking.writer_supervisor import check_tracking

ENDS = (FINISHED, STOPPED, FAILED)
"""Events that end a trial."""
CHECKPOINT, MLFLOW = "checkpoint", "mlflow"
ROUNDINGS = 4
"""Times that the rounding error of a sum is taken back."""
LOOP = "trainable.name"
"""Param of a run whose trial was trained by a loop of the user's own."""


@dataclass(kw_only=True)
class Known:
    """Evidence of one trial outside of the ledger.

    Attributes:
        source: where the evidence comes from.
        epochs: metrics by epoch.
        times: time of each epoch's report in seconds since 1970, as far as known.
        end: event of the trial's end, without its time; None if unknown.
        ended: time of the end; None if unknown.
        seconds: seconds of training up to the end; None if unknown.
        paths: its checkpoints, by epoch.
        origin: origin in its checkpoints.
        config: config in its checkpoints.
    """

    source: str = ""
    epochs: dict[int, dict[str, float]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    end: End | None = None
    ended: float | None = None
    seconds: float | None = None
    paths: dict[int, Path] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def share_seconds(self, events: Sequence[Event]) -> None:
        """Distribute the seconds that the undamaged reports do not have over the restored ones.

        The seconds of all reports then sum exactly to ``seconds``. Nothing is distributed if an
        undamaged report has no seconds (another study trained its epoch), if an epoch stays lost,
        or if reports were not sent before the trial's end.
        """
        reports = [event for event in events if event["event"] == "report"]
        restored = [event for event in reports if "recovered" in event]
        whole = [event for event in reports if "recovered" not in event]
        if (
            self.seconds is None
            or not restored
            or any(each.get("seconds") is None for each in whole)
        ):
            return
        reports.sort(key=itemgetter("epoch"))
        if [event["epoch"] for event in reports] != list(range(1, len(reports) + 1)):
            return
        if (rest := self.seconds - sum(event["seconds"] or 0.0 for event in whole)) < 0:
            return
        share = rest / len(restored)
        for event in restored:
            event["seconds"] = share
        for _ in range(ROUNDINGS):
            share += self.seconds - sum(event["seconds"] or 0.0 for event in reports)
            restored[-1]["seconds"] = share


def known_to_checkpoints(folder: Path) -> dict[str, Known]:
    """Return the evidence from the checkpoints in a study's folder, by trial."""
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
            tested = {name: float(value) for name, value in state["tested"].items()}
            end: Finished = {"event": FINISHED, "trial": trial, "metrics": tested}
            if state.get("returned"):
                end["epochs"] = int(state["epoch"])
            entry.end = end
    return found


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numeric metrics of an epoch, as a report has them."""
    return {name: float(value) for name, value in metrics.items() if name != "epoch"}


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of a study's metrics: of its epochs' reports, and of its trials' ends."""

    reported: set[str]
    final: set[str]


def add_known_to_mlflow(
    known: dict[str, Known],
    name: str,
    id_: str,
    uri: str,
    names: Names,
    may_be_own: Callable[[str], bool],
) -> set[str]:
    """Add the evidence from an MLflow store: times, and metrics that no checkpoint has.

    Returns:
        The marks of the runs that were used.

    Args:
        known: evidence by trial, added to.
        name: name of the experiment.
        id_: id of the ledger.
        uri: tracking URI of the store.
        names: names of the study's metrics.
        may_be_own: returns whether a run with a mark may have been sent from this ledger rather
            than from a copy.

    Raises:
        ValueError: the store does not answer.
    """
    check_tracking(uri)
    client = connect(uri)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return set()
    marks = set()
    for run in runs_with_key(client, experiment.experiment_id, id_):
        mark = run.data.tags.get(MARK_TAG)
        if mark is not None and not may_be_own(mark):
            continue
        marks |= {mark} - {None}
        trial = run.data.tags[KEY_TAG].partition("/")[2]
        if trial:
            _merge(known.setdefault(trial, Known(source=MLFLOW)), _known_to_run(client, run, names))
    return marks


def _known_to_run(client: Any, run: Any, names: Names) -> Known:
    found = Known(source=MLFLOW)
    histories = {
        restore(key): client.get_metric_history(run.info.run_id, key)
        for key in run.data.metrics
        if not is_old_setting(key)
    }
    plain = {sanitise(name): name for name in names.reported | names.final}
    ends = histories.pop(SECONDS, [])
    ended = max(ends, key=lambda point: int(point.timestamp), default=None)
    end = (ended.step, ended.timestamp) if ended else None
    last, ambiguous = dict[str, float](), False
    for restored, points in histories.items():
        name = plain.get(sanitise(restored), restored)
        reports, final, unclear = _split(name, points, end, names)
        ambiguous |= unclear
        if final is not None:
            last[name] = final
        for metric in reports:
            found.epochs.setdefault(metric.step, {})[name] = metric.value
            # MLflow cut the ledger's time to milliseconds
            found.times[metric.step] = (metric.timestamp + 0.5) / 1000
    status = run.data.tags.get("status", "")
    if ambiguous and end is not None:
        found.epochs.pop(end[0], None)
    _drop_incomplete(found, run.data.tags, status)
    if status in ENDS and run.info.end_time and not ambiguous:
        own_epochs = max(found.epochs, default=0) if run.data.params.get(LOOP) else 0
        found.end = _end(status, last, run.data.tags, own_epochs)
        found.ended = (run.info.end_time + 0.5) / 1000
        found.seconds = ended.value if ended else None
    return found


def _split(
    name: str, points: list[Any], end: tuple[int, int] | None, names: Names
) -> tuple[list[Any], float | None, bool]:
    """Return a metric's points by epoch, its final value or None, and whether the two cannot be
    told apart.

    Final values have the step and time of the seconds that are sent with them. A metric that was
    reported and returned at the same time is ambiguous: MLflow keeps no order of such points, and
    stores equal ones once.
    """
    points = sorted(points, key=lambda point: (point.step, point.timestamp))
    reported = name in names.reported
    at_end = bool(points) and (points[-1].step, points[-1].timestamp) == end
    if name.startswith(TEST) or (not reported and (name in names.final or at_end)):
        return [], points[-1].value if points else None, False
    if not reported:  # somebody else's
        return [], None, False
    if name not in names.final or not at_end:
        return points, None, False
    of_end = [point for point in points if point.step == points[-1].step]
    if len(of_end) == 2 and of_end[0].timestamp < of_end[1].timestamp:
        return points[:-1], points[-1].value, False
    return points[: -len(of_end)], None, True


def _drop_incomplete(found: Known, tags: dict[str, str], status: str) -> None:
    """Drop epochs that were sent only in part, or whose infinite metrics MLflow does not have.

    A run that has ended was sent completely, and its tags say where metrics were infinite.
    """
    infinite = {
        int(epoch)
        for name, text in tags.items()
        if name.startswith(NONFINITE)
        for epoch in re.findall(r"inf at (\d+)", text)
    }
    every = {name for values in found.epochs.values() for name in values}
    found.epochs = {
        step: values
        for step, values in found.epochs.items()
        if step not in infinite and (status in ENDS or set(values) == every)
    }


def _end(status: str, last: dict[str, float], tags: dict[str, str], epochs: int) -> End | None:
    """Return the event of a trial's end. ``epochs`` is set for a loop of the user's own, which may
    end without a metric, or early."""
    trial = tags[KEY_TAG].partition("/")[2]
    if status == STOPPED:
        return {"event": STOPPED, "trial": trial, "by": tags.get("stopped_by", "")}
    if status == FAILED:
        return {"event": FAILED, "trial": trial, "error": tags.get("error", "")}
    finished: Finished = {"event": FINISHED, "trial": trial, "metrics": last}
    if epochs:
        finished["epochs"] = epochs
    return finished if epochs or last else None


def _merge(entry: Known, other: Known) -> None:
    """Add missing values to ``entry``; a checkpoint's metrics take precedence over MLflow's."""
    entry.epochs = other.epochs | entry.epochs
    entry.times, entry.ended, entry.seconds = other.times, other.ended, other.seconds
    entry.end = entry.end or other.end
