"""Worker processes for tests.

Each is a rank of one group, hands back its result and ends without leaving a thread behind.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from trainers.comm import process_group

Work = Callable[[int, str], dict[str, Any]]
"""The function that each process runs, given its rank and a folder that all share; its result must
be writable as JSON."""

multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["trainers.training.trainer", "trainers.comm.process_group"]
)


def spawned(
    work: Work, folder: Path, world: int = 2, backend: str = "gloo"
) -> list[dict[str, Any]]:
    """Return the results of ``work`` in ``world`` new processes, by rank.

    Each has its process's id as ``pid``. They are forked from a process that has imported torch and
    nothing else of the test, with the environment of the first call.
    """
    mp.start_processes(
        _member, (work, str(folder), world, backend), nprocs=world, start_method="forkserver"
    )
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    assert len({os.getpid(), *(result["pid"] for result in results)}) == world + 1
    return results


def _member(rank: int, work: Work, folder: str, world: int, backend: str) -> None:
    process_group.join(backend, f"file://{folder}/store", rank, world)
    result = work(rank, folder)
    process_group.leave()
    assert not gloo_threads()
    (Path(folder) / f"{rank}.json").write_text(json.dumps({**result, "pid": os.getpid()}))


def gloo_threads() -> list[str]:
    """Return the names of this process's threads that gloo runs; none outside Linux.

    While there is one, Python may fail to end cleanly.
    """
    tasks = Path("/proc/self/task")
    names = []
    for task in tasks.iterdir() if tasks.exists() else ():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended since the folder was read
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]
