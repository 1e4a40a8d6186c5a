"""A small pool of Python threads for kernels that release the GIL.

Why not numba's own ``prange``: its threading layers change the thread count that torch sees, abort when two Python threads
enter them at once, and do not survive ``fork``. A kernel here is compiled with ``nogil=True`` and takes a half-open range of
work units, so ordinary threads are enough; handing out a range costs some ten microseconds.

Method: the caller's thread works too, so ``n`` threads are ``n - 1`` helpers. All of them draw ranges from one queue, which
keeps them busy when another process takes one core for a while. Helpers never wait for each other, so kernels may be called
from many threads at once. The pool is made on first use and again after a ``fork``: a child owns none of its parent's threads.

Limits: the thread count is per process; there is no pinning.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_CHUNKS_PER_THREAD = 8


def _default_threads() -> int:
    """OMP_NUM_THREADS where it is a positive integer (its first level), else the number of CPUs this process may use."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdigit() and int(first) > 0:
        return int(first)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Pool:
    """Helper threads of one process, replaced when the process or the thread count changes."""

    def __init__(self) -> None:
        self.threads = _default_threads()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._owner: tuple[int, int] = (0, 0)

    def executor(self) -> ThreadPoolExecutor:
        """The helpers of this process. A forked child drops its parent's executor without joining threads it does not have."""
        with self._lock:
            owner = (os.getpid(), self.threads)
            if self._executor is None or self._owner != owner:
                if self._executor is not None and self._owner[0] == owner[0]:
                    self._executor.shutdown(wait=False)
                self._executor = ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix="lns_ops")
                self._owner = owner
            return self._executor

    def after_fork(self) -> None:
        """In a child: another thread of the parent may have held the lock at the moment of the fork."""
        self._lock = threading.Lock()
        self._executor = None


_POOL = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.after_fork)


def get_num_threads() -> int:
    """Threads that a kernel may use, the caller's included."""
    return _POOL.threads


def set_num_threads(threads: int) -> None:
    """Use ``threads`` threads, the caller's included, from the next call on. torch's own count is untouched.

    Raises:
        ValueError: ``threads`` is not a positive integer.
    """
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise ValueError(f"threads={threads!r}: must be a positive integer, for example set_num_threads(2)")
    _POOL.threads = threads


def run(kernel: Callable[..., Any], units: int, grain: int, *args: Any) -> int:
    """Call ``kernel(*args, start, stop)`` over ranges that cover ``0 .. units``; returns the OR of the kernels' results.

    Args:
        kernel: a compiled function that releases the GIL, returning an integer (0 for "nothing to report").
        units: number of independent units of work.
        grain: fewest units worth handing to another thread.
        args: passed on unchanged.
    """
    threads = min(_POOL.threads, max(1, units // max(1, grain)))
    if threads == 1:
        return int(kernel(*args, 0, units)) if units else 0
    pieces = min(units // max(1, grain), threads * _CHUNKS_PER_THREAD)
    edges = [units * i // pieces for i in range(pieces + 1)]
    queue = deque(itertools.pairwise(edges))

    def work() -> int:
        result = 0
        while True:
            try:
                start, stop = queue.popleft()
            except IndexError:
                return result
            result |= int(kernel(*args, start, stop))

    futures = [_POOL.executor().submit(work) for _ in range(threads - 1)]
    result = work()
    for future in futures:
        result |= future.result()
    return result
