"""A server of Google Cloud Storage's JSON API on loopback, as far as storing studies needs it.

None can be installed from a package registry with preconditions, so this one is written after the
documentation: objects written whole (multipart and resumable uploads), read, listed by prefix and
delimiter in pages, removed, with strong consistency and ``ifGenerationMatch``.

Source: https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 50
"""Entries of a list at most, fewer than Google's 1,000, so that pages are turned."""


class Bucket:
    """The objects of one bucket, by name, and the uploads that are under way."""

    def __init__(self, name: str) -> None:
        self.name, self.lock = name, threading.Lock()
        self.objects: dict[str, tuple[bytes, dict[str, Any]]] = {}
        self.uploads: dict[str, tuple[str, str | None, bytearray]] = {}
        self.generations = itertools.count(1)

    def write(self, name: str, content: bytes, generation: str | None) -> dict[str, Any] | None:
        """Write an object and return what it is; None where the precondition fails."""
        with self.lock:
            here = self.objects[name][1]["generation"] if name in self.objects else "0"
            if generation is not None and generation != here:
                return None
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            entry = {
                "kind": "storage#object", "bucket": self.name, "name": name, "updated": now,
                "timeCreated": now, "size": str(len(content)), "metageneration": "1",
                "generation": str(next(self.generations)),
            }  # fmt: skip
            self.objects[name] = content, entry
            return entry

    def entries(self, prefix: str, delimiter: str) -> list[str | dict[str, Any]]:
        """Return objects, and each common prefix up to the delimiter once, in order."""
        with self.lock:
            found: dict[str, str | dict[str, Any]] = {}
            for name in sorted(self.objects):
                if name.startswith(prefix):
                    head, mark, _ = name[len(prefix) :].partition(delimiter or "\0")
                    key = prefix + head + mark
                    found[key] = key if mark else self.objects[name][1]
            return [found[key] for key in sorted(found)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def do_GET(self) -> None:
        path, query = self._request()
        if found := re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)", path):
            kept = self._bucket(found[1]).objects.get(unquote(found[2]))
            if kept is None:
                return self._answer(404)
            return self._answer(200, kept[0] if query.get("alt") == "media" else kept[1])
        found = re.fullmatch(r"/storage/v1/b/([^/]+)/o/?", path)
        if not found or found[1] != self.bucket.name:
            return self._answer(404)
        entries = self.bucket.entries(query.get("prefix", ""), query.get("delimiter", ""))
        first = int(query.get("pageToken", "0"))
        last = first + min(PAGE, int(query.get("maxResults", PAGE)))
        page = entries[first:last]
        listed: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [e for e in page if isinstance(e, dict)],
            "prefixes": [e for e in page if isinstance(e, str)],
        }
        if last < len(entries):
            listed["nextPageToken"] = str(last)
        return self._answer(200, listed)

    def do_POST(self) -> None:
        path, query = self._request()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path.startswith("/resumable/"):
            return self._part(path.rpartition("/")[2], content)
        found = re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path)
        if not found or found[1] != self.bucket.name:
            return self._answer(404)
        generation = query.get("ifGenerationMatch")
        if query["uploadType"] == "resumable":
            upload = str(next(self.bucket.generations))
            self.bucket.uploads[upload] = query["name"], generation, bytearray()
            self._location = f"http://{self.headers['Host']}/resumable/{upload}?upload_id={upload}"
            return self._answer(200, {})
        kind = self.headers["Content-Type"].encode()
        whole = BytesParser().parsebytes(b"Content-Type: " + kind + b"\n\n" + content)
        name = json.loads(whole.get_payload()[0].get_payload())["name"]
        boundary = (
            b"--" + re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
        )
        body = content.split(boundary, 2)[2].partition(b"\n\n")[2]
        return self._written(name, body[: body.rindex(b"\n" + boundary + b"--")], generation)

    def _part(self, upload: str, content: bytes) -> None:
        name, generation, had = self.bucket.uploads[upload]
        had += content
        last, _, size = self.headers["Content-Range"].partition("-")[2].partition("/")
        if size != "*" and int(last) + 1 == int(size):
            return self._written(name, bytes(had), generation)
        self._range = f"bytes=0-{len(had) - 1}"
        return self._answer(308)

    def do_DELETE(self) -> None:
        path, _ = self._request()
        found = re.fullmatch(r"/storage/v1/b/([^/]+)/o/(.+)", path)
        with self.bucket.lock:
            there = self.bucket.objects.pop(unquote(found[2]), None) if found else None
        ended = self.bucket.uploads.pop(path.rpartition("/")[2], None)
        self._answer(499 if ended else 204 if there else 404)

    def _written(self, name: str, content: bytes, generation: str | None) -> None:
        entry = self.bucket.write(name, content, generation)
        self._answer(412 if entry is None else 200, entry or {})

    def _request(self) -> tuple[str, dict[str, str]]:
        self._location = self._range = ""
        parts = urlsplit(self.path)
        return parts.path, {key: values[0] for key, values in parse_qs(parts.query).items()}

    def _bucket(self, name: str) -> Bucket:
        return self.bucket if name == self.bucket.name else Bucket(name)

    def _answer(self, status: int, content: bytes | dict[str, Any] = b"") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        if status >= 400:
            body = json.dumps({"error": {"code": status, "message": str(status)}}).encode()
        self.send_response(status)
        for header, value in (("Location", self._location), ("Range", self._range)):
            if value:
                self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def serve(bucket: str) -> Iterator[int]:
    """Yield the port of a server with one empty bucket, which ends with the block."""
    handler = type("Handler", (_Handler,), {"bucket": Bucket(bucket)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
