"""Access to existing studies: find them, read their state, find their trials, list them.

This module only reads ledgers. Commands that write a ledger take its lock first, so they refuse
while the study runs.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.config import StudyConfig
from study.ledger.lock import is_locked
from study.ledger.log import FILE, Contents, describe_damage, how_to_repair, open_ledger
from study.ledger.state import ENDED, FAILED, StudyState, TrialState, fold
from study.ledger.storage import refresh, study_folders
from study.program import lns_study
from study.results.configurations import groups_of_seeds
from study.results.objectives import diverged
from trainers.object_store import check_links, local_folder, place_of
from trainers.text import nearest

WHY = 200
"""Most characters of a reason for which a study cannot be read."""


def find(study: str, storage: str) -> Path:
    """Return the folder of a study, given its name or its folder.

    Raises:
        ValueError: the study is unknown, with a list of the storage's studies; or a link of another
            user of the machine leads to it.
    """
    direct = Path(study)
    if (direct / FILE).exists():
        check_links(study)
        return direct.resolve()
    check_links(storage)
    folder = StudyConfig(name=study, storage=storage).folder
    refresh(folder)
    if (folder / FILE).exists():
        return folder
    names = [path.name for path in folders(storage)]
    place = place_of(local_folder(storage))
    raise ValueError(
        f"study {study!r}: no such study{nearest(study, names)} in {place} (there:"
        f" {', '.join(names) or 'none'}); name its storage with --storage, in Python with"
        " storage=..."
    )


def placed(study: StudyConfig, folder: Path) -> StudyConfig:
    """Return a study's config with the current location of its folder as storage."""
    return dataclasses.replace(study, storage=place_of(folder.parent))


def continued(study: StudyConfig, folder: Path) -> StudyConfig:
    """Return the config with which the study in ``folder`` is resumed.

    Raises:
        ValueError: the folder's name is not the study's, so a run would write to another folder.
    """
    if folder.name != study.slug:
        raise ValueError(
            f"{folder}: is a renamed folder, or a copy, of the study {study.name!r}, which only"
            f" continues in a folder of its own name; name it {study.slug}, or run a study of the"
            f" name {folder.name!r} after `lns-study import` has taken this one's trials"
        )
    return placed(study, folder)


def folders(storage: str) -> list[Path]:
    """Return the folders of all studies in a storage, by name."""
    return study_folders(storage)


def read(folder: Path) -> StudyState:
    """Return the state of the study in ``folder`` from the undamaged lines of its ledger.

    ``damage`` describes the damaged ones.

    Raises:
        ValueError: the ledger holds no plan.
    """
    contents = open_ledger(folder)
    state = fold(contents.events)
    state.damage = _damage(folder, contents)
    if not state.plan:
        raise ValueError(
            f"{folder}: {state.damage}"
            if state.damage
            else (
                f"{folder}: its ledger holds no plan; run the study first with"
                f" `{lns_study('run', 'CONFIG')}`"
            )
        )
    return state


def read_whole(folder: Path) -> StudyState:
    """Return the state of the study in ``folder``; its config must be readable too.

    Raises:
        ValueError: the ledger or its config cannot be read.
    """
    try:
        state = read(folder)
        _ = state.config
    except (OSError, ValueError):
        raise
    except Exception as error:  # values that no version of ours has written, or a later one
        raise ValueError(
            f"{folder / FILE}: holds what this version cannot read ({type(error).__name__}:"
            f" {str(error)[:WHY]}); use the version that wrote it"
        ) from None
    return state


def damage_of(folder: Path) -> str:
    """Describe the damage of the ledger in ``folder`` and its repair; "" if it is undamaged."""
    return _damage(folder, open_ledger(folder))


def _damage(folder: Path, contents: Contents) -> str:
    if not contents.damage:
        return ""
    return (
        f"the ledger is damaged: {describe_damage(contents.damage)}; to repair it:"
        f" {how_to_repair(folder)}"
    )


def whole(folder: Path) -> StudyState:
    """Return the state of the study in ``folder``; refuse a damaged ledger.

    For commands that would copy incomplete data elsewhere.

    Raises:
        ValueError: the ledger holds no plan, or is damaged.
    """
    state = read(folder)
    if state.damage:
        raise ValueError(f"{folder}: {state.damage}")
    return state


def condition(folder: Path, state: StudyState) -> str:
    """Return ``running``, ``damaged`` or the last run's outcome, ``interrupted`` if killed."""
    if is_locked(folder):
        return "running"
    if state.damage:
        return "damaged"
    return state.outcome or "interrupted"


def find_trial(state: StudyState, key: str) -> TrialState:
    """Return the trial with an id, a unique prefix of an id, or a name.

    The name is ``label #number`` or ``label, seed N``.

    Raises:
        ValueError: no trial matches, or more than one.
    """
    exact = [trial for trial in state.known.values() if trial.id == key]
    found = exact or [
        trial
        for trial in state.known.values()
        if trial.id.startswith(key)
        or key in (f"{trial.row} #{trial.number}", f"{trial.row}, seed {trial.seed}")
    ]
    if len(found) != 1:
        some = ", ".join(trial.id for trial in list(state.known.values())[:5])
        raise ValueError(
            f"trial {key!r}: {len(found) or 'no'} trials match; give an id such as {some}"
            f" (`{lns_study('status', 'STUDY')}` lists them)"
        )
    return found[0]


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
