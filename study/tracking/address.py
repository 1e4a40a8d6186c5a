"""Addresses of MLflow's server and its pages."""

from __future__ import annotations

import urllib.parse

from study.config import default_tracking_uri
from study.program import lns_study
from study.tracking_uri import without_login, without_password

WHERE = "mlflow.json"
"""File in the study's folder with the store, and the experiment, parent run and view in it.

The report's links are made from it.
"""


def page(experiment: str, view: str) -> str:
    """Return the address of a saved view within MLflow's interface."""
    query = urllib.parse.urlencode({"viewStateShareKey": view, "workflowType": "machine_learning"})
    return f"#/experiments/{experiment}/runs?{query}"


HOST = "127.0.0.1"
PORT = 5000


def how_to_open(uri: str, storage: str, page: str) -> str:
    """Describe in one line how to open a page of a tracking store in the browser.

    Args:
        uri: tracking URI of the store.
        storage: folder of the studies, as the user wrote it.
        page: address within MLflow's interface, ``#/experiments/...``; "" for its first page.
    """
    if is_server(uri):
        return f"{without_login(uri).rstrip('/')}/{page}"
    words = ["ui"]
    if uri != default_tracking_uri(storage):
        words += ["--tracking-uri", without_password(uri)]
    return f"{lns_study(*words, storage=storage)}   then open its link, then http://{HOST}:{PORT}/{page}"


def is_server(uri: str) -> bool:
    """Tell whether a tracking URI is that of a server, with an interface of its own.

    If not, it is that of a database.
    """
    return uri.startswith(("http://", "https://"))
