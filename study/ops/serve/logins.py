"""Limits on password checks, so that a flood of wrong passwords does not stop a team's server.

Checking a password takes about 0.1 s of a CPU core, by design. So each worker process checks few
passwords at once, and rejects further ones with :class:`TooManyLoginsError`:

- Logins that MLflow has in its cache need no check (``is_remembered``).
- Logins that were valid before (``known``) are checked in threads of their own, so that they do not
  wait behind the flood. The cache forgets them after a minute; changed passwords are noticed then.
- Other logins have a limit in total (:data:`MOST_WAITING`) and for each user name
  (:data:`MOST_OF_A_NAME`). The latter counts wrong passwords for :data:`WRONG_SECONDS`, which also
  slows down guessing.

Requests with the same login share one check. A check that has not begun is dropped if all clients
that wait for it have disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

CHECKS = 2
"""Maximum number of passwords that a process checks at once, for known and for other logins."""
MOST_WAITING = 32
"""Maximum number of checks of unknown logins, running and waiting."""
MOST_OF_A_NAME = 5
"""Maximum number of checks for one user name: running, waiting, and wrong in the last
:data:`WRONG_SECONDS`."""
WRONG_SECONDS = 10.0
MOST_WRONG = 4096
"""Maximum number of wrong logins to count; the oldest is forgotten first."""

Check = Callable[[str, str], bool]


class TooManyLoginsError(Exception):
    """Too many passwords wait to be checked, or too many were wrong for this user name."""


class FileSet(MutableSet[str]):
    """A set of names that several processes share: one empty file for each name in a folder.

    An unreadable folder is an empty set.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder

    def __contains__(self, name: object) -> bool:
        return (self._folder / str(name)).exists()

    def __iter__(self) -> Iterator[str]:
        return (file.name for file in self._folder.iterdir())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, value: str) -> None:
        """Add a name."""
        with contextlib.suppress(OSError):
            (self._folder / value).touch(mode=0o600)

    def discard(self, value: str) -> None:
        """Remove a name if it is there."""
        with contextlib.suppress(OSError):
            (self._folder / value).unlink()


@dataclass
class _Running:
    user: str
    known: bool
    future: Future[bool]
    waiting: int = 0


class Logins:
    """Checks user names and passwords within limits; see the module docstring.

    Args:
        is_login: returns whether a user name and password are valid; slow.
        is_remembered: returns whether they were found valid a moment ago; fast.
        known: digests of logins that were valid; shared by the server's processes.
        key: secret key of the digests; the same in all processes that share ``known``.
    """

    def __init__(
        self,
        is_login: Check,
        is_remembered: Check = lambda user, password: False,
        *,
        known: MutableSet[str] | None = None,
        key: bytes = b"",
    ) -> None:
        self._is_login, self.is_remembered = is_login, is_remembered
        self._known: MutableSet[str] = set() if known is None else known
        self._key = key or secrets.token_bytes(32)
        self._threads = {known: ThreadPoolExecutor(CHECKS) for known in (True, False)}
        self._lock = threading.RLock()  # of the next two
        self._running = dict[str, _Running]()
        self._wrong = deque[tuple[float, str]](maxlen=MOST_WRONG)

    async def check(self, user: str, password: str) -> bool:
        """Return whether a login is valid.

        A check that has not begun is dropped once all callers that wait for it are cancelled.

        Raises:
            TooManyLoginsError: the login is unknown and a limit is reached.
        """
        if "\0" in user:  # PostgreSQL raises an error for such a text
            return False
        digest = hmac.digest(self._key, f"{user}:{password}".encode(), "sha256").hex()
        with self._lock:
            running = self._running.get(digest)
            if running is None:
                running = self._begin(digest, user, password)
            running.waiting += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(running.future))
        finally:
            running.waiting -= 1
            if not running.waiting:
                running.future.cancel()

    def _begin(self, digest: str, user: str, password: str) -> _Running:
        known = digest in self._known
        if not known:
            names = [other.user for other in self._running.values() if not other.known]
            old = time.monotonic() - WRONG_SECONDS
            wrong = sum(name == user and when > old for when, name in self._wrong)
            if len(names) >= MOST_WAITING or names.count(user) + wrong >= MOST_OF_A_NAME:
                raise TooManyLoginsError
        future = self._threads[known].submit(self._is_login, user, password)
        running = self._running[digest] = _Running(user, known, future)
        future.add_done_callback(partial(self._end, digest, user))
        return running

    def _end(self, digest: str, user: str, future: Future[bool]) -> None:
        """Note the result of a check."""
        with self._lock:
            del self._running[digest]
            if future.cancelled() or future.exception() is not None:
                return
            if future.result():
                self._known.add(digest)
            else:
                self._known.discard(digest)
                self._wrong.append((time.monotonic(), user))
