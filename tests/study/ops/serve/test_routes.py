"""The routes of the installed MLflow: each was reviewed, and is allowed or refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from study.ops.serve.mlflow_server import LOGINS, SECRET, STORE
from study.ops.serve.routes import ALLOWED, is_allowed, refuse_name
from study.ops.serve.team import PASSWORD, auth_settings

REFUSED = {
    "* /ajax-api/3.0/mlflow/assistant/**": "runs shell commands as the server's user",
    "* /ajax-api/3.0/jobs/**": "starts and ends jobs of the server",
    "* /{api}/3.0/mlflow/jobs/**": "ends jobs of the server",
    "* /{api}/3.0/mlflow/scorer/**": "runs code of clients",
    "* /{api}/3.0/mlflow/scorers/**": "keeps code of clients, to run it",
    "* /{api}/3.0/mlflow/genai/**": "starts jobs",
    "* /{api}/3.0/mlflow/prompt-optimization/**": "starts jobs",
    "* /{api}/3.0/mlflow/issues**": "starts jobs",
    "* /{api}/3.0/mlflow/demo/**": "writes experiments of its own",
    "* /gateway/**": "calls other servers with keys of this one",
    "* /{api}/2.0/mlflow/gateway-proxy": "calls other servers",
    "* /{api}/3.0/mlflow/gateway/**": "keeps keys for other servers",
    "* /{api}/2.0/mlflow/webhooks**": "calls addresses that clients name",
    "* /{api}/2.0/mlflow/runs/create-promptlab-run": "is part of the gateway",
    "* /{api}/2.0/mlflow/upload-artifact": "is a second way to upload",
    "* /{api}/2.0/mlflow/registered-models/**": "studies register no models",
    "* /{api}/2.0/mlflow/model-versions/**": "reads at places that clients name",
    "* /model-versions/get-artifact": "reads at places that clients name",
    "* /{api}/2.0/mlflow/traces**": "studies have no traces",
    "* /{api}/3.0/mlflow/traces**": "studies have no traces",
    "* /{api}/2.0/mlflow/unified-traces": "studies have no traces",
    "* /{api}/2.0/mlflow/get-online-trace-details": "studies have no traces",
    "* /{api}/2.0/mlflow/get-trace-artifact": "reads at places that clients name",
    "* /{api}/3.0/mlflow/get-trace-artifact": "reads at places that clients name",
    "* /v1/traces": "studies have no traces",
    "* /{api}/3.0/mlflow/datasets/**": "evaluates traces",
    "* /{api}/3.0/mlflow/label-schemas/**": "evaluates traces",
    "* /{api}/3.0/mlflow/review-queues/**": "evaluates traces",
    "* /{api}/3.0/mlflow/mcp-servers**": "is a registry of other servers",
    "* /{api}/3.0/mlflow/workspaces**": "names places for artifacts",
    "* /ajax-api/3.0/mlflow/ui-telemetry": "reports to MLflow's makers",
    "* /{api}/2.0mlflow/experiments/search-datasets": "answers nothing, by a slip of MLflow's",
    "GET /build/<path:filename>": "has the static files a second time",
    "GET /graphql": "MLflow's pages use POST",
    "GET /health": "the guard answers it",
    "Mount ": "is Flask's routes, which are listed by themselves",
}
"""Routes that our servers refuse, each with the reason; ``{api}`` as in
``study/ops/serve/routes.py``, ``*`` any method, ``**`` any rest."""

ROUTES = """
import json, os
from mlflow.server import app as pages
from mlflow.server.auth import create_app

def native(routes):
    for route in routes:
        if hasattr(route, "effective_candidates"):  # of a router that FastAPI includes
            yield from native(route.effective_candidates())
        else:
            yield route

served = create_app(pages)
found = [(method, rule.rule) for rule in pages.url_map.iter_rules() for method in rule.methods]
for route in native(served.routes):  # what has no methods is mounted, or takes websockets
    methods = getattr(route, "methods", None) or [type(route).__name__]
    found += [(method, route.path) for method in methods]
print(json.dumps(sorted(set(found))))
"""


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Method and rule of every route of MLflow with logins, in Flask's spelling."""
    folder = tmp_path_factory.mktemp("routes")
    uri = f"sqlite:///{folder}/mlflow.db"
    with (folder / "auth.ini").open("w") as file:
        auth_settings(uri).write(file)
    variables = {
        STORE: uri,
        LOGINS: str(folder / "auth.ini"),
        SECRET: "s" * 32,
        PASSWORD: "correct horse battery",
        "_MLFLOW_SGI_NAME": "uvicorn",
    }
    done = subprocess.run(
        [sys.executable, "-c", ROUTES],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    found = [(method, _as_flask(rule)) for method, rule in json.loads(done.stdout)]
    return [pair for pair in found if pair[0] not in ("HEAD", "OPTIONS")]


def _as_flask(rule: str) -> str:
    """Write FastAPI's ``{name:path}`` as ``<path:name>``."""
    return re.sub(r"\{(\w+):path\}", r"<path:\1>", rule).replace("{", "<").replace("}", ">")


def _refused(method: str, rule: str) -> list[str]:
    """Return the entries of :data:`REFUSED` that have a route."""
    kinds = {r"\{api\}": "(ajax-)?api", r"\*\*": ".*", r"\* ": r"\w+ "}
    found = []
    for entry in REFUSED:
        pattern = re.escape(entry).replace(r"\ ", " ")
        for kind, expression in kinds.items():
            pattern = pattern.replace(kind, expression)
        if re.fullmatch(pattern, f"{method} {rule}"):
            found.append(entry)
    return found


def test_every_route_of_mlflow_is_allowed_or_refused(routes: list[tuple[str, str]]) -> None:
    """A route of a newer MLflow is on neither list: review it, then add it to one."""
    decided = {
        f"{method} {rule}": is_allowed(method, re.sub("<.*?>", "x", rule))
        + len(_refused(method, rule))
        for method, rule in routes
    }
    assert len(decided) > 500
    assert {route: times for route, times in decided.items() if times != 1} == {}


def test_no_list_has_a_route_that_mlflow_has_not(routes: list[tuple[str, str]]) -> None:
    there = {re.sub("<(?:path:)?.*?>", "<>", f"{method} {rule}") for method, rule in routes}
    listed = {
        re.sub("<(?:path:)?.*?>", "<>", " ".join(line.split())).replace("{api}", api)
        for line in ALLOWED.splitlines()
        for api in ("api", "ajax-api")
        if line
    }
    assert listed - there == set()
    used = {entry for method, rule in routes for entry in _refused(method, rule)}
    assert REFUSED.keys() - used == set()


@pytest.mark.parametrize(
    "path",
    [
        "//",
        "/get-artifact/",
        "/./get-artifact",
        "/get-artifact\n",
        "/get-artifact?",
        "/api/2.0/mlflow/runs/get/..",
        "/API/2.0/mlflow/runs/get",
        "/x/api/2.0/mlflow/runs/get",
        "/ajax-api/2.0/mlflow/logged-models/x/y",
        "/ajax-api/2.0/mlflow/logged-models//artifacts/files",
        "http://127.0.0.1/api/2.0/mlflow/runs/get",
        "*",
        "",
    ],
)
def test_another_spelling_of_a_path_is_another_path(path: str) -> None:
    assert is_allowed("GET", "/get-artifact")
    assert is_allowed("HEAD", "/api/2.0/mlflow/runs/get")
    assert not is_allowed("GET", path)
    assert not is_allowed("get", "/get-artifact")
    assert not is_allowed("OPTIONS", "/get-artifact")
    assert not is_allowed("DELETE", "/get-artifact")


ARTIFACT = "/api/2.0/mlflow-artifacts/artifacts/1/run/artifacts/"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a" * 256, "256 bytes"),
        ("é" * 128, "256 bytes"),
        ("a/" * 600 + "b", "1,024"),
        ("a\0b", "control character"),
        ("a\nb", "control character"),
        ("\x7f", "control character"),
        ("\ufffd.txt", "UTF-8"),
        (".", "'.'"),
        ("a/./b", "'.'"),
        ("..", "'..'"),
        ("a/../b", "'..'"),
        ("a/", "''"),
        ("/etc/passwd", "''"),
    ],
)
def test_an_odd_name_of_an_artifact_is_refused_in_words(name: str, said: str) -> None:
    for path in (ARTIFACT, ARTIFACT.replace("/api", "/ajax-api"), ARTIFACT.replace(
            "artifacts/1", "mpu/create/1")):  # fmt: skip
        refusal = refuse_name(path + name, b"")
        assert said in refusal
        assert len(refusal) < 300


def test_an_odd_name_in_a_query_is_refused_and_usual_names_are_not() -> None:
    for path in ("/get-artifact", "/api/2.0/mlflow/artifacts/list", ARTIFACT.split("/1/")[0]):
        for value in ("a" * 300, "%00", "%ff"):
            assert refuse_name(path, f"run_uuid=1&path={value}".encode())
            assert refuse_name("/", f"artifact_file_path=a&artifact_file_path={value}".encode())
        for value in ("", "report/report.html", ".", "report/", "%C3%A9", "a%20b"):
            assert refuse_name(path, f"run_uuid=1&path={value}".encode()) == ""
    for name in ("report.html", "a b/ä.png", "~", "..a", "a:b", "*", "a" * 255):
        assert refuse_name(ARTIFACT + name, b"") == ""
    assert refuse_name("/", b"filter=%00") == ""
