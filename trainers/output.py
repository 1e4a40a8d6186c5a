"""Output of a machine's worker processes, limited in size.

A process prints into a pipe, and the fork server writes to its own standard output, the study's
``workers.log``. For each process the first :data:`HEAD` bytes are written at once, and the last
:data:`TAIL` at its end, so the log has errors and their context even if a process prints a lot.
When the file has :data:`FILE` bytes, only the last bytes are written. A note replaces omitted
output.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

HEAD, TAIL, FILE = 256 << 10, 16 << 10, 64 << 20
FLUSH_SECONDS = 600.0
"""Seconds after which the last bytes are written even if the process is still printing."""
PIPE = 1 << 16
"""Capacity of a pipe in bytes."""


class Output:
    """The output of one process.

    Args:
        descriptor: reading end of the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._room = descriptor, HEAD
        self._tail, self._left_out, self._written = b"", 0, time.monotonic()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._descriptor

    def read(self) -> bool:
        """Read the available output; return False if all writing ends of the pipe are closed."""
        content = self._next() if self._descriptor >= 0 else None
        self._take(content or b"")
        return content != b""

    def close(self) -> None:
        """Read the remaining output and close the pipe, even if another process has its other
        end."""
        while content := self._next():
            self._take(content)
        self._flush()
        os.close(self._descriptor)
        self._descriptor = -1

    def _next(self) -> bytes | None:
        """Return available output; b"" at the end of the pipe, None if there is no output yet."""
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
    """Append to this process's standard output; errors, such as a full disk, are ignored."""
    with contextlib.suppress(OSError):
        while content:
            content = content[os.write(sys.stdout.fileno(), content) :]
