"""Places in an object store (S3, what speaks its protocol, Google's), and the folders for them.

A place is a path, or a URL ``s3://bucket/prefix`` or ``gs://bucket/prefix``. What lies at a URL has
a *cache*, the folder ``~/.cache/lns-study/s3/bucket/prefix`` or the same below
``$LNS_STUDY_CACHE``: programs work there, and upload what must last. The path follows from the URL
and the URL from the path, so nothing else notes which folder belongs to which.

Objects are written whole or not at all, and a new one only where none is (S3: ``PutObject`` with
``If-None-Match: *``; Google: ``ifGenerationMatch=0``), by which two writers find out about each
other. A store that does not answer is asked again for :data:`PATIENCE_SECONDS`.

Credentials are found by the stores' client libraries as ever, in the environment or the machine's
role, and are never part of a URL; ``$AWS_ENDPOINT_URL`` names a store other than AWS's,
``$STORAGE_EMULATOR_HOST`` one other than Google's, which is asked without credentials.

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
"""Environment variable with the folder of all caches."""
FILE_SCHEME, S3_SCHEME, GOOGLE_SCHEME = "file://", "s3://", "gs://"
SCHEMES = (S3_SCHEME, GOOGLE_SCHEME)
PATIENCE_SECONDS = 600.0
"""Seconds for which a store that does not answer is asked again."""
LONGEST_PAUSE = 2.0
QUIET_SECONDS = 5.0
"""Seconds of waiting for a store about which nothing is said."""
CONNECT_SECONDS, READ_SECONDS = 5, 60
FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError)
"""Answers of a store, which asking again does not change."""
_PLACE = re.compile(r"(s3|gs)://[a-z0-9][a-z0-9._-]+(/[\w.=+ -]+)*/?")

Found = TypeVar("Found")


def is_url(place: str) -> bool:
    """Tell whether a place lies in an object store."""
    return place.startswith(SCHEMES)


def check_place(key: str, place: str) -> None:
    """Refuse a URL that this package does not store at.

    Raises:
        ValueError: the scheme is unknown, or the URL holds a login, a query or ``..``.
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
    """Return where credentials and the endpoint of a store come from."""
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
    return Path(os.path.realpath(path))  # of a link loop the path, which whoever writes finds out


def place_of(folder: Path) -> str:
    """Return the place that a folder stands for: the URL of a cache, else the folder's path."""
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
        patience: seconds for which every method asks again while the store does not answer.

    Raises:
        OSError: the store does not answer, or refuses the request.
    """

    def __init__(self, url: str, patience: float = PATIENCE_SECONDS) -> None:
        self.url, self._patience = url.rstrip("/"), patience
        # s3fs asks for the size of an object first, to fetch a large one in parts
        self._at_once = {"max_concurrency": 1} if url.startswith(S3_SCHEME) else {}

    def put(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Write an object; with ``new`` only if there is none with other content.

        A request whose answer was lost is sent again, so one's own object may be there.

        Raises:
            FileExistsError: with ``new``, the object is there and has other content.
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
            FileNotFoundError: there is none.
        """
        return bytes(self._ask(lambda fs, path: fs.cat_file(path, **self._at_once), name))

    def put_file(self, name: str, path: Path) -> None:
        """Write an object with a file's content; a large one in parts, several at a time."""
        path.stat()  # so that only the store has something to be not found

        def request(fs: Any, place: str) -> None:
            try:
                fs.put_file(str(path), place)
            except FileNotFoundError as error:  # an upload in parts that the store has ended
                raise OSError(errno.EIO, str(error)) from None

        self._ask(request, name)

    def get_file(self, name: str, path: Path) -> None:
        """Write an object's content to a file, whole or not at all.

        Raises:
            FileNotFoundError: there is none.
        """
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.unlink(missing_ok=True)  # a link there would be followed
        try:
            self._ask(lambda fs, place: fs.get_file(place, str(part)), name)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def get_all(self, names: list[str]) -> list[bytes]:
        """Return the contents of several small objects, which are fetched at the same time.

        Asks again for those alone that failed: of thousands some may fail each time.

        Raises:
            FileNotFoundError: there is no object of one of the names.
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
        """Return the names of all objects below ``under``, relative to it, in order."""
        return sorted(self.sizes(under))

    def sizes(self, under: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all objects below ``under``, by names relative to it.

        Left out are those whose names would lead out of a folder, such as ``../x`` and ``/x``.
        """
        top = self._path(under)
        found = self._ask(lambda fs, path: fs.find(path, detail=True), under)
        sizes = {path[len(top) + 1 :]: info["size"] for path, info in found.items()}
        return {name: size for name, size in sizes.items() if _stays_inside(name)}

    def folders(self) -> list[str]:
        """Return the first parts of the names that have several, in order."""
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
        """Return the seconds since an object was written, by this machine's clock."""
        info = self._ask(lambda fs, path: fs.info(path), name)
        written = info["LastModified"] if "LastModified" in info else info["mtime"]
        return time.time() - float(written.timestamp())

    def remove(self, name: str) -> None:
        """Remove an object if it is there."""
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
            except Exception as error:  # the client library has a tree of its own
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
    """Tell whether an object's name, as a path, leads to a file below the folder for its store."""
    return not {"", ".", ".."} & set(name.split("/"))


def _is_precondition(error: Exception) -> bool:
    """Tell whether an error is S3's answer to ``If-None-Match`` (HTTP status 412).

    Its error number, EINVAL, says too little: s3fs gives it to an upload that broke off, too.
    """
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code") in ("PreconditionFailed", "412")


def _is_refusal(scheme: str, error: Exception) -> bool:
    """Tell whether an error is final, or this machine's own, such as missing credentials."""
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
    """Return the client of a process, which one that it forks does not share."""
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

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # of waiting this module tells
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
