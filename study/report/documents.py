"""Studies and trials as the entries of a list and as JSON documents, which ``--json`` prints.

Times are seconds since 1970, durations seconds, and errors fractions, as in the ledger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.ledger.log import FILE, describe_damage, open_ledger
from study.ledger.state import ENDED, FAILED, StudyState, TrialState, fold
from study.ledger.studies import WHY, condition
from study.results.configurations import groups_of_seeds
from study.results.objectives import diverged, objective
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


def overview(folder: Path) -> dict[str, Any]:
    """Return a study's entry in a list.

    The entry has the name, condition, number of trials, best first objective and time of the last
    event. The numbers are texts; ``counts`` and ``value`` have them as numbers, if it has a plan.
    """
    try:
        return _entry(folder)
    except Exception as error:  # whatever a stranger, or a later version, wrote: others are shown
        return _unreadable(folder, error)


def _entry(folder: Path) -> dict[str, Any]:
    contents = open_ledger(folder)
    events, state = contents.events, fold(contents.events)
    state.damage = describe_damage(contents.damage)
    if not state.plan:
        return {
            "name": folder.name,
            "condition": "damaged" if state.damage else "empty",
            "trials": "0",
            "best": "-",
            "time": events[-1]["time"] if events else 0.0,
        }
    metric = state.config.search.first
    values = [
        group.objectives[metric.name]
        for group in groups_of_seeds(state.trials, [metric.name], state.config.search.constraints)
        if group.eligible
    ]
    usable = [value for value in values if math.isfinite(value)]
    best = min(usable, key=lambda value: metric.sign * value, default=None)
    ended, failed, lost = (
        sum(trial.status in ENDED for trial in state.trials),
        sum(trial.status == FAILED for trial in state.trials),
        sum(diverged(trial, metric.name) for trial in state.trials),
    )
    return {
        "name": state.config.name,
        "condition": condition(folder, state),
        "trials": f"{ended}/{len(state.trials)}"
        + (f", {failed} failed" if failed else "")
        + (f", {lost} diverged" if lost else ""),
        "counts": {
            "planned": len(state.trials),
            "ended": ended,
            "failed": failed,
            "diverged": lost,
        },
        "best": f"{metric.name} {metric.said(best)}" if best is not None else "-",
        "value": None if best is None else {"metric": metric.name, "value": best},
        # events that were taken over have the times of their source
        "time": max(event["time"] for event in events),
    }


def _unreadable(folder: Path, error: Exception) -> dict[str, Any]:
    """Return the entry of a study that cannot be read: no permission, a folder in place of the
    ledger, or a key or value of a later version."""
    why = " ".join(str(error).split()) or type(error).__name__
    time = 0.0
    with suppress(OSError):
        time = (folder / FILE).lstat().st_mtime
    return {
        "name": folder.name,
        "condition": f"unreadable: {why if len(why) <= WHY else f'{why[:WHY]}...'}",
        "trials": "?",
        "best": "-",
        "time": time,
    }
