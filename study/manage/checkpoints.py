"""Checkpoints in a study's folder: the ledger that they belong to, and what they know of their
trials.

Reads no tensors. A checkpoint's state has, under ``origin``, the id of the ledger whose study
trained it, the code that did (a git commit) and the trial's plan. So a checkpoint left behind by
another ledger, or by one that was deleted, is not taken for this study's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.ledger.lines import Event
from study.ledger.log import Ledger, how_to_repair
from study.ledger.state import FINISHED, STOPPED, StudyState, code_of
from study.plan.trials import PlannedTrial
from trainers.checkpoint.manifest import STATE, digest_file, file_digests, read_state
from trainers.checkpoint.remote import fetched
from trainers.files import NotRegularError
from trainers.object_store import Store, is_url, place_of


def origin_of(trial: PlannedTrial, ledger: str, plan: Event) -> dict[str, Any]:
    """Return the origin that a trial's checkpoints carry: the ledger's id, the code, the plan.

    The plan lacks the trial's config, which checkpoints have anyway.
    """
    return {"ledger": ledger, "code": code_of(plan), "trial": trial.origin}


def checkpoints_of(folder: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Yield trial, folder and state of every whole checkpoint of the study in ``folder``.

    The newest of a trial comes first.
    """
    for path in _paths(folder):
        with suppress(ValueError):
            yield path.parent.name, path, read_state(path)


def check_checkpoints(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the place of each of a study's checkpoints, and whether it is as it was written.

    Those of an object store are fetched.

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
    """Yield the folders of completely written checkpoints, ours and Ray Train's.

    The newest of a trial comes first.
    """
    for trial in sorted([*(folder / "checkpoints").glob("*"), *(folder / "train").glob("*")]):
        yield from sorted((path.parent for path in trial.glob(f"*/{STATE}")), reverse=True)


def check_same_ledger(ledger: Ledger, before: StudyState) -> None:
    """Refuse to continue trials from checkpoints that another ledger's study left in this folder.

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
