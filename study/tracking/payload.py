"""Contents of a trial's MLflow run: params, metrics, tags, data sets, documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from study.config import OUTSIDE
from study.config.keys import flatten
from study.config.space import describe
from study.config.yaml_loader import dump
from study.evidence.record import SAME
from study.ledger.events import Planned, Report
from study.ledger.state import (
    ENDED,
    FAILED,
    FINISHED,
    PLANNED,
    RUNNING,
    STOPPED,
    StudyState,
    TrialState,
    code_of,
    shown_study,
)
from study.plan.identity import named_code
from study.results.objectives import bits_of
from study.results.summary import summarise
from study.text import layout_of
from study.tracking.names import BITS, SECONDS, TAG_LENGTH, nonfinite_tags, of_row, sanitise
from trainers.files import has_links
from trainers.user_code import without_folder

KEY_TAG = "lns_study.key"
PARENT_TAG = "mlflow.parentRunId"
KIND_TAG = "mlflow.experimentKind"
MARK_TAG = "lns_study.mark"
"""Tag with the mark of the ledger's last event at the time of the run's last update
(:meth:`StudyState.is_own`)."""
PROFILE = "profile"
"""Artifact folder of the profile that ``trial.profile.steps`` recorded.

It is sent just before the run's end; sending it again overwrites the same files.
"""
TEXT = 5000
"""Maximum number of characters of an error or a description in a tag."""
RESULT_TAGS = ("status", "restarts", "stopped_by", "error")
"""Tags of an ended trial; they are removed if the trial is retried."""

LATER = 0.002
"""Time step in seconds that is at least 1 ms after rounding, MLflow's resolution."""

MLFLOW_STATUS = {
    RUNNING: "RUNNING",
    FINISHED: "FINISHED",
    STOPPED: "FINISHED",
    FAILED: "FAILED",
    PLANNED: "KILLED",
}
"""Status of an MLflow run by the status of its trial.

A trial that a scheduler ended early counts as finished; it has the tag ``stopped_by``.
"""


def expected_points(trial: TrialState) -> set[tuple[str, int, int, float | None]]:
    """Return every metric point that a trial's run should have.

    A point is a tuple of name, step, timestamp (ms) and value (None for NaN).
    """
    metrics = [
        metric for epoch, event in trial.reports.items() for metric in report_metrics(epoch, event)
    ]
    metrics += end_metrics(trial)
    return {point_of(metric) for metric in metrics}


def point_of(metric: Any) -> tuple[str, int, int, float | None]:
    """Convert an MLflow metric into a comparable point; NaN becomes None."""
    return (
        metric.key,
        metric.step,
        metric.timestamp,
        None if math.isnan(metric.value) else metric.value,
    )


def may_differ(trial: TrialState) -> set[str]:
    """Return the params that may legitimately differ from the run's, which MLflow cannot change."""
    relieved = tuple(f"{key}." for key in trial.relief)
    return {
        sanitise(key)
        for key in flatten(trial.config)
        if key in OUTSIDE or f"{key}.".startswith(relieved)
    }


def comparable_params(trial: TrialState, params: Mapping[str, str]) -> dict[str, str]:
    """Normalise a trial's params for a comparison: paths of the user's code lose their folders.

    The trial id ignores these folders as well; the files' digests are separate params.

    Args:
        trial: the trial.
        params: actual or expected params of its run.
    """
    factories = {sanitise(key) for key in named_code(trial.config)}
    return {
        key: without_folder(value) if key in factories else value for key, value in params.items()
    }


def expected_tags(trial: TrialState) -> dict[str, str]:
    """Return the tags about a trial's end, if it has ended, and about infinite metrics."""
    history = {epoch: dict(event["metrics"]) for epoch, event in trial.reports.items()}
    history[trial.epochs] = {**history.get(trial.epochs, {}), **trial.test}
    ended = {
        "status": trial.status,
        "restarts": str(trial.restarts),
        "stopped_by": trial.stopped_by,
        "error": trial.error[:TEXT],
    }
    return nonfinite_tags(history) | {
        name: value for name, value in ended.items() if value and trial.status in ENDED
    }


def claim_tags(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the parent run's tags about a study's statement and the verdicts on its claims.

    A claim that was changed after the first trial is marked ``NOT AS STATED``.

    Args:
        figures: figures of the report (:mod:`study.evidence.record`).
    """
    tags = {
        f"claim.{claim['name']}": f"{_mark(claim)}{claim['outcome']}: {claim['shown']}"[:TEXT]
        for claim in figures.get("claims", [])
    }
    said = figures.get("stated")
    return tags | ({"stated.sha256": said["digest"]} if said else {})


def _mark(claim: Mapping[str, Any]) -> str:
    return "" if claim.get("stated", SAME) == SAME else "NOT AS STATED, "


def report_metrics(epoch: int, event: Report, first: str = "") -> Iterator[Any]:
    """Yield an epoch's metrics.

    Args:
        epoch: the epoch.
        event: its report.
        first: name of the metric to yield first. MLflow's comparison of runs opens on the metric
            that its database got first.
    """
    metrics = sorted(event["metrics"].items(), key=lambda entry: entry[0] != first)
    return metrics_of(dict(metrics), epoch, event["time"])


def end_metrics(trial: TrialState) -> Iterator[Any]:
    """Yield the test metrics of an ended trial, and the training seconds at each of its ends.

    If the last epoch reported the same metric, the test value gets a later timestamp: of points
    with equal step and time, MLflow shows the largest value as the latest.
    """
    for time_, seconds in trial.ends:
        yield from metrics_of({SECONDS: seconds}, trial.epochs, time_)
    if trial.status in ENDED and trial.ended is not None:
        last = trial.reports.get(trial.epochs)
        for name, value in trial.test.items():
            least = last["time"] + LATER if last and name in last["metrics"] else 0.0
            yield from metrics_of({name: value}, trial.epochs, max(trial.ended, least))


def metrics_of(values: Mapping[str, Any], epoch: int, seconds: float) -> Iterator[Any]:
    """Yield MLflow metrics without infinite values, which are listed in tags instead."""
    from mlflow.entities import Metric

    for name, value in values.items():
        if name != "epoch" and value is not None and not math.isinf(value):
            yield Metric(sanitise(name), float(value), int(seconds * 1000), epoch)


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a trial's params: its settings, such as ``precision.format``, and :data:`BITS`.

    The bits are left out if they are not known here (``table(path.npy)``).
    """
    bits = bits_of(dict(config))
    params = {sanitise(name): str(value) for name, value in flatten(dict(config)).items()}
    return params if bits is None else params | {BITS: f"{bits:g}"}


def row_figures(state: StudyState) -> dict[str, float]:
    """Return mean and spread of each row's test figure, in the display unit, by metric name."""
    figures: dict[str, float | None] = {}
    summary = summarise(state)
    mean, spread = of_row(summary.metric, ""), of_row(summary.metric)
    for row in summary.rows:
        figures |= {f"{row.label}{mean}": row.mean, f"{row.label}{spread}": row.sd}
    return {name: value for name, value in figures.items() if value is not None}


def datasets_of(plan: Planned, trial: TrialState) -> Iterator[Any]:
    """Yield the data set of a trial, with its digest and sizes."""
    import json

    from mlflow.entities import Dataset, DatasetInput, InputTag

    if entry := data_of(plan, trial):
        sizes = {key: entry[key] for key in ("train", "validation", "test") if key in entry}
        source = json.dumps({"source": entry["source"]})
        digest, of = entry["digest"], "sha256"
        if entry.get("part"):
            digest, of = f"{entry['files'][:24]}-{entry['train']}", "files and examples"
        profile = json.dumps({"examples": sizes, of: digest})
        dataset = Dataset(entry["name"], digest[:36], "local", source, profile=profile)
        yield DatasetInput(
            dataset, tags=[InputTag("mlflow.data.context", "train, validation, test")]
        )


def data_of(plan: Planned, trial: TrialState) -> dict[str, Any] | None:
    """Return the plan's description of a trial's data; None if the plan has none.

    In a search with rounds a trial may train on part of the examples, for which the plan has no
    digest. The entry then has the digest of all examples, and ``part`` is true.
    """
    if trial.own_loop:
        return None
    chosen = trial.config["data"]
    named = {"name": chosen["name"], "args": chosen.get("args")}
    found: list[dict[str, Any]] = [
        entry
        for entry in plan["data"]
        if all(entry.get(key, value) == value for key, value in named.items())
    ]
    if not found:
        return None
    for key, value in {"root": chosen.get("root"), "validation": chosen["validation_size"]}.items():
        found = [entry for entry in found if entry.get(key) == value] or found
    size = chosen["train_size"] or max(entry.get("train", 0) for entry in found)
    part = found[0] | ({"train": size, "part": True} if "files" in found[0] else {})
    return next((entry for entry in found if entry.get("train", 0) == size), part)


def documents_of(plan: Planned) -> dict[str, str]:
    """Return the parent run's text files by name: config, plan, environment."""
    trials = [
        {key: trial[key] for key in ("id", "row", "seed", "number", "params") if key in trial}
        for trial in plan["trials"]
    ]
    environment = {**plan["provenance"], "hardware": plan.get("hardware", {}), "data": plan["data"]}
    return {
        "config.yaml": dump(shown_study(plan["study"])),
        "plan.yaml": dump(trials),
        "environment.yaml": dump(environment),
    }


def _code_tags(plan: Planned) -> dict[str, str]:
    code = plan["provenance"]
    versions = {f"version.{name}": version for name, version in code["versions"].items()}
    return {
        "git.commit": str(code["commit"]),
        "git.dirty": str(code["dirty"]),
        "python": code["python"],
        **versions,
    }


def parent_tags(plan: Planned) -> dict[str, str]:
    """Return the tags of the parent run."""
    question = (
        {"mlflow.note.content": plan["study"]["question"][:TAG_LENGTH]}
        if plan["study"]["question"]
        else {}
    )
    data = "; ".join(f"{entry['source']} (sha256 {entry['digest'][:12]})" for entry in plan["data"])
    return {
        "study": plan["study"]["name"],
        "kind": "study",
        "data": data[:TEXT],
        **question,
        **_code_tags(plan),
    }


def trial_tags(trial: TrialState, plan: Planned) -> dict[str, str]:
    """Return the tags of a trial's run."""
    names = {
        "study": plan["study"]["name"],
        "kind": "trial",
        "row": trial.row,
        "seed": str(trial.seed),
        "trial": trial.id,
    }
    config = trial.config
    names |= {
        "format": config["precision"]["format"],
        "workers": str(config["workers"]),
        "layout": layout_of(config),
    }
    if trial.number is not None:
        names |= {"configuration": str(trial.number), "sampled": describe(trial.params)[:TEXT]}
    if set(trial.commits) - {code_of(plan)}:  # package versions of other commits are unknown
        return names | {"git.commit": ", ".join(trial.commits)}
    return names | _code_tags(plan)


def profiles(folder: Path, trial: TrialState) -> list[Path]:
    """Return the existing folders of a trial's profile, except folders with links.

    The place depends on the executor: some keep the profile in a storage of their own.
    """
    return [
        path
        for path in (folder / "profiles" / trial.id, folder / "train" / trial.id / "profile")
        if path.is_dir() and not has_links(path)
    ]
