"""Executors for tests, loaded by worker processes; each one's trials misbehave in one way."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from lns_ops.cpu.compiler import thread_pool
from trainers.config import TrialConfig
from trainers.workers import process_reset
from trainers.workers.in_process import InProcess
from trainers.workers.messages import Beginning


class Mistaken(InProcess):
    """An executor with a mistake in its code."""

    def step(self) -> dict[str, Any]:
        return self.nothing_of_that_name  # type: ignore[attr-defined, no-any-return]


class Unlucky(InProcess):
    """An executor that fails after its first epoch, with an error that another try may not have."""

    def step(self) -> dict[str, Any]:
        if self._training.epoch == 1:
            raise ConnectionError("the network is away")
        return super().step()


class Greedy(InProcess):
    """An executor that keeps more memory than a process may."""

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        process_reset.MEMORY = -(1 << 40)
        return super().begin(config, checkpoints)


class Threads(InProcess):
    """An executor that leaves threads behind."""

    def end(self) -> None:
        super().end()
        for _ in range(process_reset.THREADS + 1):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


class Limited(InProcess):
    """An executor whose process may have 700 MB more than after its first, small trial."""

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        if (
            max(config.model.hidden) > 1000
            and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        ):
            size = psutil.Process().memory_info().vms + (700 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        return super().begin(config, checkpoints)


class Team(InProcess):
    """An executor that reports whether its process shares kernels among torch's threads."""

    def step(self) -> dict[str, Any]:
        return super().step() | {"team": thread_pool._POOL.has_team}


DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
sys.stdout.write(f"{os.getpid()}\\n")
sys.stdout.flush()
time.sleep(600)
"""


class Parent(InProcess):
    """An executor that starts processes: a child, one in a session of its own, one that has left
    its parents, and a grandchild. They write their ids into the file ``children``."""

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        with open(Path(self._context.plan["storage"]) / "children", "wb") as file:
            sleep = "echo $$ && exec sleep 600"
            for words in (
                ["sh", "-c", sleep],
                ["setsid", "sh", "-c", sleep],
                [sys.executable, "-c", DAEMON],
                ["sh", "-c", f"sh -c '{sleep}' & wait"],
            ):
                subprocess.Popen(words, stdout=file)
        return super().begin(config, checkpoints)


class Talker(InProcess):
    """An executor that prints two million lines and ends its process with a crash."""

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        for first in range(0, 2_000_000, 1000):
            print("\n".join(f"line {number}" for number in range(first, first + 1000)))
        os.kill(os.getpid(), signal.SIGSEGV)
        return super().begin(config, checkpoints)


class Environment(InProcess):
    """An executor that reports an environment variable beside its metrics."""

    def step(self) -> dict[str, Any]:
        return super().step() | {"variable": os.environ.get("LNS_TEST_VARIABLE", "")}
