"""An API server of Kubernetes for tests: ``kubectl`` itself talks to it, over HTTP on loopback.

It knows ConfigMaps, Jobs and RayJobs, keeps them in memory, and refuses what a cluster refuses:
annotations of more than 256 KiB, a ConfigMap of more than 1 MiB, other data for an immutable
ConfigMap, and a server-side apply without ``force`` that would change another manager's field. No
operator runs: applied objects have the status that the test sets.

Source: https://kubernetes.io/docs/reference/using-api/server-side-apply/, validation/objectmeta.go
of apimachinery (TotalAnnotationSizeLimitB), core/validation (MaxSecretSize). Limits: no schemas,
no watches, a list in an object is one field, managers never give up a field.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

MOST_ANNOTATIONS = 256 * 1024
"""Largest size of an object's annotations, names and values together, in bytes."""
MOST_DATA = 2**20
"""Largest size of a ConfigMap's data, decoded, in bytes."""
KINDS = {"v1": "ConfigMap", "batch/v1": "Job", "ray.io/v1": "RayJob"}
VERBS = ["create", "delete", "get", "patch"]
Answer = tuple[int, dict[str, Any]]


class KubernetesApi(ThreadingHTTPServer):
    """The server; ``objects`` has the stored objects by path, ``applied`` the bodies of applies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.applied: list[dict[str, Any]] = []
        self.status: dict[str, str] = {}
        self._created = 0
        self._managers: dict[str, dict[tuple[str, ...], str]] = {}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The stored objects of a kind."""
        return [each for each in self.objects.values() if each["kind"] == kind]

    def answer(self, verb: str, path: str, query: dict[str, str], body: bytes, form: str) -> Answer:
        if verb == "GET" and (found := _discovery(path)) is not None:
            return 200, found
        if verb == "POST":
            sent = json.loads(body)
            return self._keep(f"{path}/{sent['metadata']['name']}", sent, query)
        if verb == "PATCH" and form == "application/apply-patch+yaml":
            self.applied.append(sent := yaml.load(body, yaml.CSafeLoader))
            return self._keep(path, sent, query, apply=True)
        if path not in self.objects:
            return _refusal(404, "NotFound", f'"{path.rpartition("/")[2]}" not found')
        if verb == "PATCH":
            return self._keep(path, json.loads(body), query)
        return 200, self.objects.pop(path) if verb == "DELETE" else self.objects[path]

    def _keep(
        self, path: str, sent: dict[str, Any], query: dict[str, str], apply: bool = False
    ) -> Answer:
        live, name = self.objects.get(path), path.rpartition("/")[2]
        merged = _merged(live or {}, sent) | ({"status": self.status} if apply else {})
        if why := _fault(live, merged):
            return _refusal(422, "Invalid", f'{merged["kind"]} "{name}" is invalid: {why}')
        manager = query.get("fieldManager", "")
        owners = self._managers.setdefault(path, {}) if live else {}
        before = dict(_fields(live or {}))
        changed = {key for key, value in _fields(sent) if before.get(key) != value}
        taken = sorted(key for key in changed if owners.get(key, manager) != manager)
        if apply and taken and query.get("force") != "true":
            fields = ", ".join(".".join(key) for key in taken)
            return _refusal(409, "Conflict", f"conflict with {owners[taken[0]]!r}: {fields}")
        self._managers[path] = owners | dict.fromkeys(changed, manager)
        self._created += not live
        merged["metadata"].setdefault("uid", f"uid-{self._created}")
        self.objects[path] = merged
        return (200 if live else 201), merged


def _fault(live: dict[str, Any] | None, new: dict[str, Any]) -> str:
    """Return the cluster's objection to an object; "" if it accepts it."""
    notes = new["metadata"].get("annotations", {})
    if sum(len(key.encode()) + len(value.encode()) for key, value in notes.items()) > (
        MOST_ANNOTATIONS
    ):
        return f"metadata.annotations: Too long: may not be more than {MOST_ANNOTATIONS} bytes"
    data = new.get("binaryData", {})
    if sum(len(base64.b64decode(value)) for value in data.values()) > MOST_DATA:
        return f"[]: Too long: may not be more than {MOST_DATA} bytes"
    if live and live.get("immutable") and data != live.get("binaryData"):
        return "data: Forbidden: field is immutable when `immutable` is set"
    return ""


def _merged(live: dict[str, Any], sent: dict[str, Any]) -> dict[str, Any]:
    """Return the object with the sent values, merged mapping by mapping."""
    inner = {
        key: _merged(live[key], value)
        for key, value in sent.items()
        if isinstance(value, dict) and isinstance(live.get(key), dict)
    }
    return {**live, **sent, **inner}


def _fields(
    value: dict[str, Any], at: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every field of an object, with its path."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _fields(inner, (*at, key))
        else:
            yield (*at, key), inner


def _discovery(path: str) -> dict[str, Any] | None:
    """Return the server's description of itself at a path; None for the path of an object."""
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [
            {"name": group.partition("/")[0], "versions": [shown], "preferredVersion": shown}
            for group in KINDS
            if "/" in group
            for shown in [{"groupVersion": group, "version": "v1"}]
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        return {"paths": {_root(each)[1:]: {"serverRelativeURL": _open(each)} for each in KINDS}}
    for version, kind in KINDS.items():
        if path == _root(version):
            return _resources(version, kind)
        if path == _open(version):
            return _schema(version, kind)
    return None


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _open(version: str) -> str:
    return f"/openapi/v3{_root(version)}"


def _resources(version: str, kind: str) -> dict[str, Any]:
    name = kind.lower()
    about = {"name": f"{name}s", "singularName": name, "namespaced": True, "kind": kind}
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [{**about, "verbs": VERBS}],
    }


def _schema(version: str, kind: str) -> dict[str, Any]:
    """The part of a schema by which ``kubectl`` knows that the server validates fields itself."""
    group = version.rpartition("/")[0]
    patch = {
        "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
        "x-kubernetes-group-version-kind": {"group": group, "version": "v1", "kind": kind},
        "responses": {},
    }
    place = f"{_root(version)}/namespaces/{{namespace}}/{kind.lower()}s/{{name}}"
    about = {"title": "Kubernetes", "version": "v1.34.0"}
    return {"openapi": "3.0.0", "info": about, "paths": {place: {"patch": patch}}}


def _refusal(code: int, reason: str, message: str) -> Answer:
    about = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**about, "reason": reason, "message": message, "code": code}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: KubernetesApi

    def log_message(self, format: str, *values: Any) -> None:
        """Do nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        form = self.headers.get("Content-Type", "")
        code, said = self.server.answer(self.command, url.path, query, body, form)
        content = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 (names of http.server)


@contextmanager
def kubernetes_api() -> Iterator[KubernetesApi]:
    """Run a server while the context lasts."""
    with KubernetesApi() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def kubeconfig(server: KubernetesApi) -> str:
    """The configuration that leads ``kubectl`` to a server, as the text of its file."""
    url = f"http://127.0.0.1:{server.server_address[1]}"
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": url}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
    )
