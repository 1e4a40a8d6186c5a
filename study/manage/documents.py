"""Studies and trials as JSON documents, which ``--json`` prints.

Times are seconds since 1970, durations seconds, and errors fractions, as in the ledger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study.ledger.state import StudyState, TrialState
from study.manage.studies import condition, overview
from study.results.objectives import objective
from trainers.object_store import place_of


def finite(value: Any) -> Any:
    """Return a value of dicts, lists and scalars with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def entry_document(folder: Path) -> dict[str, Any]:
    """Return a study's entry in a list: condition, number of trials, best figure, last event."""
    entry = overview(folder)
    return {
        **{key: entry[key] for key in ("name", "condition", "time")},
        "folder": place_of(folder),
        "trials": entry.get("counts"),
        "best": entry.get("value"),
    }


def study_document(folder: Path, state: StudyState) -> dict[str, Any]:
    """Return a study's progress: condition, limits, and each trial without its epochs."""
    config = state.config
    return {
        "name": config.name,
        "folder": place_of(folder),
        "condition": condition(folder, state),
        "damage": state.damage,
        "limits": state.limits or dataclasses.asdict(config.limits),
        "metric": config.primary_metric.name,
        "trials": [_progress(trial) for trial in state.trials],
    }


def trial_document(folder: Path, trial: TrialState) -> dict[str, Any]:
    """Return everything about a trial, with its config and every epoch report."""
    return {
        **_progress(trial),
        "study": place_of(folder),
        "actor": trial.actor,
        "code": trial.commits,
        "checkpoints": trial.checkpoints_left(),
        "config": trial.config,
        "epochs_reported": [
            {"epoch": epoch, "time": report["time"], "metrics": report["metrics"]}
            for epoch, report in sorted(trial.reports.items())
        ],
    }


def _progress(trial: TrialState) -> dict[str, Any]:
    last = trial.reports[trial.epoch]["metrics"] if trial.reports else {}
    own = ("id", "row", "number", "seed", "params", "status", "epoch", "epochs", "restarts")
    return {
        **{name: getattr(trial, name) for name in own},
        "error": trial.error,
        "seconds": objective(trial, "seconds"),
        "metrics": last,
        "test": trial.test,
    }
