"""What the worker processes of a machine print, and how much of it is kept.

A process prints into a pipe, and the fork server writes to its own standard output, the study's
``workers.log``. Of each process the first :data:`HEAD` bytes are kept, as they come, and the last
:data:`TAIL`, so that an error and what led to it are there, however much a process prints. Once the
file has :data:`FILE` bytes, the last ones are kept alone. What is left out is said in its place.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

HEAD, TAIL, FILE = 256 << 10, 16 << 10, 64 << 20
FLUSH_SECONDS = 600.0
"""Seconds after which the last bytes of a process that prints on are written, not only at its
end."""
PIPE = 1 << 16
"""Bytes that a pipe holds."""


class Output:
    """What a process prints.

    Args:
        descriptor: end of the pipe that is read.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._room = descriptor, HEAD
        self._tail, self._left_out, self._written = b"", 0, time.monotonic()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._descriptor

    def read(self) -> bool:
        """Take what the process has printed; return False once nobody can print any more."""
        content = self._next() if self._descriptor >= 0 else None
        self._take(content or b"")
        return content != b""

    def close(self) -> None:
        """Take the rest, and close the pipe, whose other end a child of the process may hold."""
        while content := self._next():
            self._take(content)
        self._flush()
        os.close(self._descriptor)
        self._descriptor = -1

    def _next(self) -> bytes | None:
        """Return some of what was printed; b"" at the end, None where nothing is there yet."""
        try:
            return os.read(self._descriptor, PIPE)
        except BlockingIOError:
            return None

    def _take(self, content: bytes) -> None:
        if os.fstat(sys.stdout.fileno()).st_size >= FILE:
            self._room = 0
        head, rest = content[: self._room], content[self._room :]
        self._room -= len(head)
        _write(head)
        self._tail += rest
        if (more := len(self._tail) - TAIL) > TAIL:
            cut = self._tail.find(b"\n", more) + 1 or more
            self._left_out += cut
            self._tail = self._tail[cut:]
        if self._tail and time.monotonic() - self._written > FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self._left_out:
            _write(b"\n[%d bytes of what this process printed are left out]\n" % self._left_out)
        _write(self._tail)
        self._tail, self._left_out, self._written = b"", 0, time.monotonic()


def _write(content: bytes) -> None:
    """Append to this process's standard output; a full disk takes nothing."""
    with contextlib.suppress(OSError):
        while content:
            content = content[os.write(sys.stdout.fileno(), content) :]
