"""Where MLflow's server is, and the addresses of its pages."""

from __future__ import annotations

import urllib.parse

from study.config import default_tracking_uri
from study.program import lns_study
from study.tracking_uri import without_login, without_password

WHERE = "mlflow.json"
"""In the study's folder: the store, and experiment, parent run and view in it; the report's links
are made from it."""


def page(experiment: str, view: str) -> str:
    """The address of a saved view within MLflow's interface."""
    query = urllib.parse.urlencode({"viewStateShareKey": view, "workflowType": "machine_learning"})
    return f"#/experiments/{experiment}/runs?{query}"


HOST = "127.0.0.1"
PORT = 5000


def how_to_open(uri: str, storage: str, page: str) -> str:
    """How a user gets to a page of a tracking store in the browser, in one line.

    Args:
        uri: the store's.
        storage: folder of the studies, as the user wrote it.
        page: the address within MLflow's interface, ``#/experiments/...``; "" for its first page.
    """
    if is_server(uri):
        return f"{without_login(uri).rstrip('/')}/{page}"
    words = ["ui"]
    if uri != default_tracking_uri(storage):
        words += ["--tracking-uri", without_password(uri)]
    return f"{lns_study(*words, storage=storage)}   then open http://{HOST}:{PORT}/{page}"


def is_server(uri: str) -> bool:
    """Whether a tracking URI is that of a server, which has an interface of its own, and not of a
    database."""
    return uri.startswith(("http://", "https://"))
