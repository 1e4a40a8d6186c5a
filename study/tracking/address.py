"""Addresses of MLflow's server and its pages."""

from __future__ import annotations

import json
import urllib.parse
from contextlib import suppress
from pathlib import Path

from study.config import StudyConfig, default_tracking_uri
from study.program import lns_study
from study.tracking_uri import WHOLE, is_named, without_login, without_password

OFF = "none"
"""Tracking URI with which nothing is sent to MLflow."""
FILE = "sqlite:///"
"""Begin of the URI of a database in a local file."""

WHERE = "mlflow.json"
"""File in the study's folder with the store, and the experiment, parent run and view in it.

The report's links are made from it.
"""


def page(experiment: str, view: str) -> str:
    """Return the address of a saved view within MLflow's interface."""
    query = urllib.parse.urlencode({"viewStateShareKey": view, "workflowType": "machine_learning"})
    return f"#/experiments/{urllib.parse.quote(experiment, safe='')}/runs?{query}"


def pages_of(folder: Path, uri: str) -> dict[str, str]:
    """Return the prepared pages of the studies in a folder by name, the latest first.

    MLflow's own list of experiments leads to its overview for GenAI, which is empty.

    Args:
        folder: folder of the studies.
        uri: tracking store that serves the pages; studies with another one are left out.
    """
    pages = {}
    notes = list(folder.glob(f"*/{WHERE}"))
    for note in sorted(notes, key=lambda note: note.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError, KeyError):
            place = json.loads(note.read_text())
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
        page: address within a server's interface, ``#/experiments/...``; "" for its first page.
    """
    if is_server(uri):
        return f"{without_login(uri).rstrip('/')}/{page}"
    words = ["ui"]
    if uri != default_tracking_uri(storage):
        words += ["--tracking-uri", without_password(uri)]
    return f"{lns_study(*words, storage=storage)}   then open its link to this study"


def store_of(study: StudyConfig, given: str | None) -> str:
    """Return the store that a command about a study that exists connects to: ``given``, or the
    study's own.

    A ledger may be a stranger's, and a client sends its user's login, or files that the address
    makes it read, to whatever it connects to. So an address other than a local file's must be named
    by the command, by ``MLFLOW_TRACKING_URI``, or by a study that this process has run.

    Raises:
        ValueError: only the ledger names it.
    """
    uri = study.tracking
    if given or uri == OFF or uri.startswith(FILE) or is_named(uri):
        return given or uri
    raise ValueError(
        f"tracking_uri={uri!r}: only the study's ledger names this address, and logins are sent to"
        f" none that its reader has not named; give `--tracking-uri {without_password(uri)}`, or"
        f" set {WHOLE} in the environment; `--tracking-uri {OFF}` connects to none"
    )


def naming(uri: str) -> list[str]:
    """Return the option with which a command names a store, see :func:`store_of`; none for a local
    file."""
    return [] if uri == OFF or uri.startswith(FILE) else ["--tracking-uri", without_password(uri)]


def is_server(uri: str) -> bool:
    """Tell whether a tracking URI is that of a server, with an interface of its own.

    If not, it is that of a database.
    """
    return uri.startswith(("http://", "https://"))
