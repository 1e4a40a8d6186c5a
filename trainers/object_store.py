"""Places in an object store (S3 or compatible, Google Cloud Storage), and their local caches.

A place is a path, or a URL ``s3://bucket/prefix`` or ``gs://bucket/prefix``. A URL has a local
*cache*, the folder ``~/.cache/lns-study/s3/bucket/prefix`` or the same below
``$LNS_STUDY_CACHE``. Programs work in the cache, and upload files that must persist. Path and URL
can be derived from each other, so no table of them is needed.

Objects are written completely or not at all. A new object is only written if it does not exist (S3:
``PutObject`` with ``If-None-Match: *``; Google: ``ifGenerationMatch=0``), so concurrent writers
detect each other. Requests are retried for :data:`PATIENCE_SECONDS` while a store does not answer.

The stores' client libraries find credentials in the environment or the machine's role; they are
never part of a URL. ``$AWS_ENDPOINT_URL`` selects a store other than AWS's;
``$STORAGE_EMULATOR_HOST`` one other than Google's, which is used without credentials.

Sources: https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html,
https://cloud.google.com/storage/docs/request-preconditions
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

CACHE = "LNS_STUDY_CACHE"
"""Environment variable with the parent folder of all caches."""
MOST_LINKS = 40
"""Maximum number of links in a row; Linux follows no more."""
FILE_SCHEME, S3_SCHEME, GOOGLE_SCHEME = "file://", "s3://", "gs://"
SCHEMES = (S3_SCHEME, GOOGLE_SCHEME)
PATIENCE_SECONDS = 600.0
"""Seconds for which requests are retried while a store does not answer."""
LONGEST_PAUSE = 2.0
QUIET_SECONDS = 5.0
"""Print a notice if a store has not answered for this many seconds."""
CONNECT_SECONDS, READ_SECONDS = 5, 60
FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError)
"""Answers of a store that are not retried."""
_PLACE = re.compile(r"(s3|gs)://[a-z0-9][a-z0-9._-]+(/[\w.=+ -]+)*/?")

Found = TypeVar("Found")


def is_url(place: str) -> bool:
    """Return whether a place is a URL of an object store."""
    return place.startswith(SCHEMES)


def check_place(key: str, place: str) -> None:
    """Check the form of a place.

    Raises:
        ValueError: a URL's scheme is unknown, or the URL contains a login, a query or ``..``.
    """
    if "://" not in place or place.startswith(FILE_SCHEME + "/"):
        return
    if not is_url(place):
        raise ValueError(
            f"{key}={re.sub('//.*@', '//...@', place)!r}: must be a path, file:///path,"
            " s3://bucket/prefix or gs://bucket/prefix; mount other stores, or use their S3"
            " endpoint by AWS_ENDPOINT_URL"
        )
    if not _PLACE.fullmatch(place) or ".." in place:
        raise ValueError(
            f"{key}={re.sub('//.*@', '//...@', place)!r}: must be {place[:5]}bucket/prefix with"
            f" letters, digits and . _ - = +; {access(place)}"
        )


def access(place: str) -> str:
    """Return advice about a store's credentials and endpoint, for error messages."""
    if place.startswith(GOOGLE_SCHEME):
        return (
            "credentials go into the environment (GOOGLE_APPLICATION_CREDENTIALS) or are the"
            " machine's, another endpoint into STORAGE_EMULATOR_HOST"
        )
    return (
        "credentials go into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or are the"
        " machine's role, another endpoint into AWS_ENDPOINT_URL"
    )


def local_folder(place: str) -> Path:
    """Return the absolute folder of a place: its path, or the cache of its URL."""
    if is_url(place):
        return _caches() / place.replace("://", "/").rstrip("/")
    if "\0" in place:
        raise ValueError(f"{place!r}: must be a path without a NUL character; leave that out")
    path = Path(place.removeprefix(FILE_SCHEME)).expanduser()
    return Path(os.path.realpath(path))  # returns a link loop unchanged; a later write fails


def check_links(place: str) -> None:
    """Check that a path is no link of another user of the machine, who could change where it leads.

    Links above the path are followed, whoever made them.

    Raises:
        ValueError: it is a link of a user other than this process's and root, or leads to one.
    """
    if is_url(place) or "\0" in place:
        return
    link = Path(place.removeprefix(FILE_SCHEME)).expanduser().absolute()
    for _ in range(MOST_LINKS):
        if not link.is_symlink():
            return
        owner = owner_of_link(link)
        if owner not in (os.geteuid(), 0):
            raise ValueError(
                f"{place!r}: {link} is a link of another user of the machine (uid {owner}), who can"
                f" change where it leads; name {os.path.realpath(link)} itself, or a folder of your"
                " own"
            )
        link = link.parent / os.readlink(link)


def owner_of_link(path: Path) -> int:
    """Return the user id (uid) of a link's owner."""
    return path.lstat().st_uid


def place_of(folder: Path) -> str:
    """Return the place of a folder: the URL of a cache, else the folder's path."""
    for scheme in SCHEMES:
        top = _caches() / scheme.removesuffix("://")
        if folder.is_relative_to(top):
            return scheme + folder.relative_to(top).as_posix()
    return str(folder)


def open_store(place: str, patience: float = PATIENCE_SECONDS) -> Store | None:
    """Return the store at a URL, see :class:`Store`; None for a path."""
    return Store(place, patience) if is_url(place) else None


class Store:
    """The objects below a URL, by their names there.

    Args:
        url: the URL.
        patience: seconds for which every method retries while the store does not answer.

    Raises:
        OSError: the store does not answer, or rejects the request.
    """

    def __init__(self, url: str, patience: float = PATIENCE_SECONDS) -> None:
        self.url, self._patience = url.rstrip("/"), patience
        # otherwise s3fs first requests an object's size, to fetch a large object in parts
        self._at_once = {"max_concurrency": 1} if url.startswith(S3_SCHEME) else {}

    def put(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Write an object; with ``new``, never overwrite an object with other content.

        An object with equal content is accepted, because it may come from an earlier attempt whose
        answer was lost.

        Raises:
            FileExistsError: with ``new``, the object exists and has other content.
        """
        mode = "create" if new else "overwrite"
        try:
            self._ask(lambda fs, path: fs.pipe_file(path, content, mode=mode), name)
        except FileExistsError:
            if self.get(name) != content:
                raise

    def get(self, name: str) -> bytes:
        """Return an object's content.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        return bytes(self._ask(lambda fs, path: fs.cat_file(path, **self._at_once), name))

    def put_file(self, name: str, path: Path) -> None:
        """Upload a file as an object; a large one in parts, several at a time."""
        path.stat()  # raises for a missing file, so later FileNotFoundErrors are the store's

        def request(fs: Any, place: str) -> None:
            try:
                fs.put_file(str(path), place)
            except FileNotFoundError as error:  # the store has aborted a multipart upload
                raise OSError(errno.EIO, str(error)) from None

        self._ask(request, name)

    def get_file(self, name: str, path: Path) -> None:
        """Download an object to a file, completely or not at all.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.unlink(missing_ok=True)  # a link there would be followed
        try:
            self._ask(lambda fs, place: fs.get_file(place, str(part)), name)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def get_all(self, names: list[str]) -> list[bytes]:
        """Return the contents of several small objects, fetched concurrently.

        Only failed requests are retried, because a few of thousands may fail each time.

        Raises:
            FileNotFoundError: an object does not exist.
        """
        paths = [self._path(name) for name in names]
        found: dict[str, bytes] = {}

        def request(fs: Any, _: str) -> None:
            missing = [path for path in paths if path not in found]
            answers = fs.cat(missing, on_error="return", **self._at_once) if missing else {}
            wrong = [each for each in answers.values() if isinstance(each, Exception)]
            found.update({p: each for p, each in answers.items() if isinstance(each, bytes)})
            if wrong:
                raise wrong[0]

        self._ask(request, "")
        return [found[path] for path in paths]

    def names(self, under: str = "") -> list[str]:
        """Return the sorted names of all objects below ``under``, relative to it."""
        return sorted(self.sizes(under))

    def sizes(self, under: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all objects below ``under``, by names relative to it.

        Objects whose names would lead out of a folder, such as ``../x`` and ``/x``, are left out.
        """
        top = self._path(under)
        found = self._ask(lambda fs, path: fs.find(path, detail=True), under)
        sizes = {path[len(top) + 1 :]: info["size"] for path, info in found.items()}
        return {name: size for name, size in sizes.items() if _stays_inside(name)}

    def folders(self) -> list[str]:
        """Return the sorted names of the top-level folders."""
        try:
            found = self._ask(lambda fs, path: fs.ls(path, detail=True), "")
        except FileNotFoundError:
            return []
        begin = len(self._path("")) + 1
        names = [
            entry["name"][begin:].rstrip("/") for entry in found if entry["type"] == "directory"
        ]
        return sorted(filter(_stays_inside, names))

    def age(self, name: str) -> float:
        """Return an object's age in seconds, by this machine's clock."""
        info = self._ask(lambda fs, path: fs.info(path), name)
        written = info["LastModified"] if "LastModified" in info else info["mtime"]
        return time.time() - float(written.timestamp())

    def remove(self, name: str) -> None:
        """Remove an object if it exists."""
        with suppress(FileNotFoundError):
            self._ask(lambda fs, path: fs.rm_file(path), name)

    def _path(self, name: str) -> str:
        return f"{self.url.partition('://')[2]}/{name}".rstrip("/")

    def _ask(self, request: Callable[[Any, str], Found], name: str) -> Found:
        scheme = self.url[:5]
        filesystem, path, pause = _filesystem(scheme, os.getpid()), self._path(name), 0.1
        began, said = time.monotonic(), False
        while True:
            waited = time.monotonic() - began
            try:
                return request(filesystem, path)
            except FileNotFoundError:  # s3fs does not say which
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
            except FINAL:
                raise
            except Exception as error:  # the client libraries have their own exceptions
                if _is_precondition(error):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
                if _is_refusal(scheme, error) or waited > self._patience:
                    raise OSError(errno.EIO, f"{scheme}{path}: {error}") from None
                if waited > QUIET_SECONDS and not said:
                    said = True
                    print(
                        f"{scheme}{path} does not answer ({error}); waiting for it, at most"
                        f" {self._patience:.0f} s; Ctrl-C ends the command",
                        file=sys.stderr,
                        flush=True,
                    )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _stays_inside(name: str) -> bool:
    """Return whether an object's name, as a path, stays inside its store's local folder."""
    return not {"", ".", ".."} & set(name.split("/"))


def _is_precondition(error: Exception) -> bool:
    """Return whether an error is S3's answer to ``If-None-Match`` (HTTP status 412).

    Its error number, EINVAL, is ambiguous: s3fs also uses it for interrupted uploads.
    """
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code") in ("PreconditionFailed", "412")


def _is_refusal(scheme: str, error: Exception) -> bool:
    """Return whether an error is permanent, such as missing credentials, so that retries are
    useless."""
    if scheme == GOOGLE_SCHEME:
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError, RefreshError, TransportError

        if isinstance(error, HttpError):
            return 400 <= int(error.code or 500) < 500 and int(error.code) not in (408, 410, 429)
        refused = isinstance(error, OSError) and str(error).startswith("Forbidden")
        return refused or (
            isinstance(error, GoogleAuthError)
            and not isinstance(error, TransportError | RefreshError)
        )
    from botocore import exceptions as s3

    transient = (
        s3.ConnectionError, s3.HTTPClientError, s3.IncompleteReadError, s3.FlexibleChecksumError,
        s3.CredentialRetrievalError, s3.MetadataRetrievalError,
    )  # fmt: skip
    return isinstance(error, s3.BotoCoreError) and not isinstance(error, transient)


@functools.lru_cache(maxsize=2)
def _filesystem(scheme: str, process: int) -> Any:
    """Return this process's client; forked processes must not share it, hence ``process``."""
    package, extra = ("gcsfs", "gcs") if scheme == GOOGLE_SCHEME else ("s3fs", "s3")
    try:
        return _google() if scheme == GOOGLE_SCHEME else _s3()
    except ImportError:
        raise ValueError(
            f"storage={scheme}...: needs the package {package}; install it with pip install"
            f" 'lns-study[{extra}]'"
        ) from None


def _google() -> Any:
    from trainers._compat import google_storage_asked_once

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # this module reports waits itself
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GCS project not set")
        return google_storage_asked_once()(
            token="anon" if os.environ.get("STORAGE_EMULATOR_HOST") else None,
            requests_timeout=READ_SECONDS,
            use_listings_cache=False,
            skip_instance_cache=True,
        )


def _s3() -> Any:
    import s3fs

    found = s3fs.S3FileSystem(
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"total_max_attempts": 1},
        },
    )
    found.retries = 1
    return found


def _caches() -> Path:
    return Path(os.environ.get(CACHE) or "~/.cache/lns-study").expanduser().resolve()
