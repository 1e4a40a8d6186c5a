"""The threads that share a kernel's work: torch's OpenMP threads, or a pool of Python threads.

torch computes with OpenMP threads, which spin for some milliseconds while they wait for the next
call, and each occupies a core. Additional threads would compete with them. So if torch has several
threads, kernels run on these (:func:`~lns_ops.cpu.compiler.object_cache.share`). Otherwise
they run on a pool of Python threads: if OpenMP is missing, if torch has one thread or more than
kernels may use, and in a child of ``fork`` whose parent had OpenMP threads or had not imported this
module.

Why not numba's own ``prange``: its threading layers change the thread count that torch sees, abort
if two Python threads enter them at once, and do not survive ``fork``. A kernel here runs outside
the GIL on a half-open range of work units, so ordinary threads are enough; handing out a range
takes about ten microseconds.

Method: the caller's thread works, too, so ``n`` threads are ``n - 1`` helpers. All of them take
ranges from one queue, which keeps them busy if another process occupies a core for a while. Helpers
never wait for each other, so kernels may be called from many threads at once. The pool is created
on first use and again after a ``fork``, because a child does not have its parent's threads.

Limits: the thread count is per process; threads are not pinned.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lns_ops._compat import openmp_team
from lns_ops.cpu.compiler.object_cache import Kernel


def _default_threads() -> int:
    """Return OMP_NUM_THREADS if it is a positive integer, else the number of the process's CPUs.

    If OMP_NUM_THREADS is a list, its first level counts.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdigit() and int(first) > 0:
        return int(first)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_forked() -> bool:
    """Return whether this process was forked and has not called exec since; proc(5), ``flags``."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            return bool(int(file.read().rpartition(")")[2].split()[6]) & 0x40)
    except (OSError, ValueError, IndexError):
        return True


class _Pool:
    """The helper threads of one process, replaced when the process or the thread count changes."""

    def __init__(self) -> None:
        self.threads = _default_threads()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._owner: tuple[int, int] = (0, 0)
        self._alone = False
        self.has_team, self.used_team = not _is_forked(), False

    def executor(self) -> ThreadPoolExecutor:
        """Return the helpers of this process.

        A forked child drops its parent's executor without joining its threads, which the child does
        not have.
        """
        with self._lock:
            owner = (os.getpid(), self.threads)
            if self._executor is None or self._owner != owner:
                if self._executor is not None and self._owner[0] == owner[0]:
                    self._executor.shutdown(wait=False)
                self._executor = ThreadPoolExecutor(
                    max(1, self.threads - 1), thread_name_prefix="lns_ops"
                )
                self._owner = owner
            return self._executor

    def before_fork(self) -> None:
        """Note whether all threads are Python threads, and no OpenMP team is idle."""
        known = {
            os.getpid(),
            *(t.native_id for t in threading.enumerate() if not t.name.startswith("Dummy")),
        }
        try:
            self._alone = known.issuperset(map(int, os.listdir("/proc/self/task")))
        except OSError:
            self._alone = False

    def after_fork(self) -> None:
        """Replace the lock and drop the executor in a child.

        Another thread of the parent may have held the lock during the fork. An OpenMP team of the
        parent does not exist in the child, and OpenMP would wait for it forever. So if kernels had
        a team in the parent, torch computes with one thread, as in DataLoader workers.
        """
        if self.used_team:
            torch.set_num_threads(1)
        self.has_team = self.has_team and self._alone
        self._lock = threading.Lock()
        self._executor = None


_POOL = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_POOL.before_fork, after_in_child=_POOL.after_fork)


def get_num_threads() -> int:
    """Return the number of threads that a kernel may use, including the caller's."""
    return _POOL.threads


def set_num_threads(threads: int) -> None:
    """Use ``threads`` threads, including the caller's, from the next call on.

    If torch has several threads, at most as many are used. torch's own count does not change.

    Raises:
        ValueError: ``threads`` is not a positive integer.
    """
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise ValueError(
            f"threads={threads!r}: must be a positive integer, for example set_num_threads(2)"
        )
    _POOL.threads = threads


def _ranges(units: int, grain: int, threads: int) -> Iterator[tuple[int, int]]:
    """Cover ``0 .. units`` by ranges, large ones first, so that all threads end together."""
    start = 0
    while start < units:
        stop = min(units, start + max(grain, (units - start) // (2 * threads)))
        yield start, stop
        start = stop


def run(kernel: Kernel, units: int, grain: int, *args: Any) -> int:
    """Call ``kernel(*args, start, stop)`` over ``0 .. units``; return the OR of the results.

    Args:
        kernel: the kernel; it releases the GIL.
        units: number of independent units of work.
        grain: minimum number of units for a thread.
        args: further arguments of the kernel.
    """
    if units < 2 * grain or _POOL.threads == 1:
        return kernel.code(args)(*args, 0, units) if units else 0
    code = kernel.code(args)
    ranges = _ranges(units, max(1, grain), _POOL.threads)
    team = torch.get_num_threads()  # another team size would create and destroy threads
    if (
        1 < team <= _POOL.threads
        and _POOL.has_team
        and openmp_team()
        and (shared := getattr(code, "shared", None))
    ):
        _POOL.used_team = True
        bounds = array("q", [0, *(stop for _, stop in ranges)]).tobytes()
        return int(shared(bounds, team, *args, 0, 0))
    queue = deque(ranges)

    def work() -> int:
        result = 0
        while True:
            try:
                start, stop = queue.popleft()
            except IndexError:
                return result
            result |= code(*args, start, stop)

    helpers = min(_POOL.threads, len(queue)) - 1
    futures = [_POOL.executor().submit(work) for _ in range(helpers)]
    result = work()
    for future in futures:
        result |= future.result()
    return result
