"""Access to existing studies: find them, read their state, find their trials.

This module only reads ledgers. Commands that write a ledger take its lock first, so they refuse
while the study runs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from study.config import StudyConfig
from study.ledger.lock import is_locked
from study.ledger.log import FILE, Contents, describe_damage, how_to_repair, open_ledger
from study.ledger.state import StudyState, TrialState, fold
from study.ledger.storage import refresh, study_folders
from study.program import lns_study
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
