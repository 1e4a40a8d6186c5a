"""Addresses of MLflow's server and its pages."""

from __future__ import annotations

import os
import urllib.parse
from contextlib import suppress
from pathlib import Path

from study.config import StudyConfig, default_tracking_uri
from study.program import lns_study
from study.tracking_uri import WHOLE, is_named, without_login, without_password
from trainers.files import read_own_json
from trainers.object_store import local_folder

OFF = "none"
"""Tracking URI that turns MLflow off."""
FILE = "sqlite:///"
"""Prefix of the URI of a local SQLite file."""

WHERE = "mlflow.json"
"""File in the study's folder that records the store, experiment, parent run and view.

The report's links are made from it.
"""


def page(experiment: str, view: str) -> str:
    """Return the address of a saved view, relative to MLflow's web interface."""
    query = urllib.parse.urlencode({"viewStateShareKey": view, "workflowType": "machine_learning"})
    return f"#/experiments/{urllib.parse.quote(experiment, safe='')}/runs?{query}"


def pages_of(folder: Path, uri: str) -> dict[str, str]:
    """Return the addresses of the studies' prepared views by study name, the latest first.

    MLflow's own list of experiments leads to its GenAI overview, which is empty.

    Args:
        folder: folder of the studies.
        uri: tracking store that serves the pages; studies with another store are left out.
    """
    pages = {}
    notes = list(folder.glob(f"*/{WHERE}"))
    for note in sorted(notes, key=lambda note: note.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):
            place = read_own_json(note)
            if place["uri"] == without_login(uri):
                pages[note.parent.name] = page(place["experiment"], place["view"])
    return pages


HOST = "127.0.0.1"
PORT = 5000


def how_to_open(uri: str, storage: str, page: str) -> str:
    """Describe in one line how to open a page of a tracking store in the browser.

    Args:
        uri: tracking URI of the store.
        storage: folder of the studies, as the user wrote it.
        page: address within the web interface, ``#/experiments/...``; "" for its start page.
    """
    if is_server(uri):
        return f"{without_login(uri).rstrip('/')}/{page}"
    words = ["ui"]
    if uri != default_tracking_uri(storage):
        words += ["--tracking-uri", without_password(uri)]
    return f"{lns_study(*words, storage=storage)}   then open its link to this study"


def store_of(study: StudyConfig, given: str | None) -> str:
    """Return the store that a command about an existing study uses: ``given``, or the study's own.

    The ledger may come from an untrusted source. A client sends its user's login, and files that
    the address makes it read, to the server that it connects to, and it writes to databases.
    Therefore the user must have named the store: on the command line, in ``MLFLOW_TRACKING_URI``,
    or in a study that this process has run. The exception is a database in the storage, unless
    another user of the machine owns it, who could then choose where artifacts are written.

    Raises:
        ValueError: only the ledger names the store, or another user of the machine owns it.
    """
    uri = study.tracking
    if given or uri == OFF or is_named(uri):
        return given or uri
    if is_within(uri, study.storage):
        check_owner(uri)
        return uri
    raise ValueError(
        f"tracking_uri={without_password(uri)!r}: only the study's ledger names this address, and"
        f" {'nothing is written there' if uri.startswith(FILE) else 'logins are sent to none'}"
        f" that its reader has not named; give `--tracking-uri {without_password(uri)}`, or"
        f" set {WHOLE} in the environment; `--tracking-uri {OFF}` connects to none"
    )


def is_within(uri: str, storage: str) -> bool:
    """Return whether an address is a SQLite file in the storage, with links resolved."""
    path = uri.removeprefix(FILE)
    if not uri.startswith(FILE) or "?" in path or path.startswith("file:"):
        return False
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(local_folder(storage)))


def check_default(uri: str, storage: str, option: str = "--tracking-uri ") -> None:
    """Check a storage's default database, which the user has not named.

    Args:
        uri: address of the database.
        storage: folder of the studies.
        option: how the command names a store, for the remedy.

    Raises:
        ValueError: a link leads out of the storage, or another user of the machine owns the file.
    """
    if not is_within(uri, storage):
        place = os.path.realpath(uri.removeprefix(FILE))
        raise ValueError(
            f"tracking_uri={uri!r}: is a link to {place}, out of the storage, and nothing is"
            f" written there that you have not named; remove the link, or give"
            f" `{option}{FILE}{place}`"
        )
    check_owner(uri, option)


def check_owner(uri: str, option: str = "--tracking-uri ") -> None:
    """Check that no other user of the machine owns a SQLite file or its folder.

    Raises:
        ValueError: another user, other than root, owns one of them.
    """
    path = Path(uri.removeprefix(FILE))
    for place in (path, path.parent):
        with suppress(FileNotFoundError, NotADirectoryError):
            owner = owner_of(place)
            if owner not in (os.geteuid(), 0):
                raise ValueError(
                    f"tracking_uri={uri!r}: {place} belongs to another user of the machine"
                    f" (uid {owner}), who can choose in it where files are written and read; if you"
                    f" trust them, give `{option}{uri}`, else `{option}{OFF}`"
                )


def owner_of(path: Path) -> int:
    """Return the user id (uid) of a file's owner."""
    return path.stat().st_uid


def naming(uri: str, storage: str) -> list[str]:
    """Return the command-line option that names a store (:func:`store_of`); empty for a database
    in the storage."""
    return (
        [] if uri == OFF or is_within(uri, storage) else ["--tracking-uri", without_password(uri)]
    )


def is_server(uri: str) -> bool:
    """Return whether a tracking URI addresses a server with a web interface, not a database."""
    return uri.startswith(("http://", "https://"))
