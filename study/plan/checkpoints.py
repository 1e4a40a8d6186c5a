"""Checkpoints in a study's folder: their ledger, and the history of their trials.

Reads no tensors. A checkpoint's ``origin`` contains the id of the ledger of its study, the code
that trained it (a git commit) and the trial's plan. So a checkpoint of another or a deleted ledger
is not mistaken for this study's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.ledger.events import Planned
from study.ledger.log import Ledger, how_to_repair
from study.ledger.state import FINISHED, STOPPED, StudyState, code_of
from study.plan.trials import PlannedTrial
from trainers.checkpoint.manifest import STATE, digest_file, file_digests, read_state
from trainers.checkpoint.remote import fetched
from trainers.files import NotRegularError
from trainers.object_store import Store, is_url, place_of


def origin_of(trial: PlannedTrial, ledger: str, plan: Planned) -> dict[str, Any]:
    """Return the origin for a trial's checkpoints: the ledger's id, the code and the plan.

    The plan does not contain the trial's config, which checkpoints have separately.
    """
    return {"ledger": ledger, "code": code_of(plan), "trial": trial.origin}


def checkpoints_of(folder: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yield trial, folder and state of every complete checkpoint of the study in ``folder``, the
    newest of each trial first.
    """
    for path in _paths(folder):
        with suppress(ValueError):
            yield path.parent.name, path, read_state(path)


def check_checkpoints(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the location of each of a study's checkpoints, and whether it is undamaged.

    Checkpoints in an object store are downloaded.

    Raises:
        OSError: the store does not answer.
    """
    url = f"{place_of(folder)}/checkpoints"
    places = (
        [f"{url}/{name.removesuffix(f'/{STATE}')}" for name in Store(url).names() if STATE in name]
        if is_url(url)
        else [str(path) for path in _paths(folder)]
    )
    for place in places:
        try:
            path = fetched(place)
            files = file_digests(read_state(path))
            yield place, all(digest_file(path / name) == files[name] for name in files)
        except (ValueError, KeyError, TypeError, FileNotFoundError, NotRegularError):
            yield place, False


def _paths(folder: Path) -> Iterator[Path]:
    """Yield the folders of complete checkpoints, ours and Ray Train's, the newest of each trial
    first.
    """
    for trial in sorted([*(folder / "checkpoints").glob("*"), *(folder / "train").glob("*")]):
        yield from sorted((path.parent for path in trial.glob(f"*/{STATE}")), reverse=True)


def check_same_ledger(ledger: Ledger, before: StudyState) -> None:
    """Refuse to resume trials from checkpoints of another ledger in this folder.

    Raises:
        ValueError: there is a checkpoint of another ledger or, if the ledger is new, of a version
            that did not name the ledger.
    """
    done = {trial.id for trial in before.known.values() if trial.status in (FINISHED, STOPPED)}
    for trial, path, state in checkpoints_of(ledger.folder):
        origin = state.get("origin", {})
        known = origin.get("ledger")
        if trial not in done and known != ledger.id and (known or not ledger.history):
            of = f"ledger {known}" if known else "a ledger that is gone"
            raise ValueError(
                f"{path}: is a checkpoint of {of} (code: {origin.get('code', 'unknown')}), and this"
                f" study's is {ledger.id if ledger.history else 'new'}: its figures would come back"
                f" as newly trained; if the ledger was lost, `{how_to_repair(ledger.folder)}` makes"
                f" it again; otherwise delete {ledger.folder}, or choose another name with name=..."
                " and take finished trials over with import"
            )
