"""The ways in which a worker process trains a trial, behind one protocol: alone or as a rank of a
gang, beside others, by Ray Train."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainers.config import TrialConfig
from trainers.workers.messages import Beginning
from trainers.workers.packed import Host
from trainers.workers.resume import begin, step

if TYPE_CHECKING:
    from trainers.training.trainer import Training


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an executor is made of.

    Attributes:
        trial: its id.
        plan: of the trial, see :mod:`trainers.workers.worker_process`.
        rank, workers: of the torch.distributed group that the process has joined.
        shared: what the executors of one process keep together, by name; ``lock`` keeps them apart.
    """

    trial: str
    plan: dict[str, Any]
    rank: int = 0
    workers: int = 1
    shared: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def make_executor(context: Context) -> Executor:
    """The executor that the plan names."""
    module, _, name = str(context.plan["executor"]).partition(":")
    made: Executor = getattr(importlib.import_module(module), name)(context)
    return made


class Executor(Protocol):
    """Trains one trial."""

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        """Build the trial, continued from the first whole checkpoint.

        Raises:
            ValueError: it cannot be built.
        """

    def step(self) -> dict[str, Any]:
        """Train one epoch; its metrics, ``done`` after the last one, with the test's."""

    def save(self, folder: Path) -> None:
        """Write the trial's state; every rank of a gang is asked, one writes."""

    def profile(self) -> dict[str, bytes]:
        """The files of a profile that the last step completed, by name."""

    def end(self) -> None:
        """Let go of the trial."""


class InProcess:
    """Trains a trial, or one rank of it, in this process."""

    _training: Training | None = None

    def __init__(self, context: Context) -> None:
        self._rank, self._workers = context.rank, context.workers
        self._origin = context.plan.get("origin", {})

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        """See :class:`Executor`."""
        self._training, beginning = begin(config, checkpoints, self._rank, self._workers)
        self._training.origin = self._origin
        return beginning

    def step(self) -> dict[str, Any]:
        """See :class:`Executor`."""
        return step(self._now)

    def save(self, folder: Path) -> None:
        """See :class:`Executor`."""
        self._now.save(folder)

    def profile(self) -> dict[str, bytes]:
        """See :class:`Executor`."""
        return self._now.profiler.take()

    def end(self) -> None:
        """See :class:`Executor`."""
        self._training = None

    @property
    def _now(self) -> Training:
        assert self._training is not None
        return self._training


class Packed:
    """Trains a trial beside others of the same process."""

    def __init__(self, context: Context) -> None:
        with context.lock:
            if "host" not in context.shared:
                context.shared["host"] = Host(TrialConfig.from_dict(context.plan["config"]))
        self._host: Host = context.shared["host"]
        self._name, self._origin = context.trial, context.plan.get("origin", {})

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        """See :class:`Executor`."""
        return self._host.begin(self._name, config, checkpoints, self._origin)

    def step(self) -> dict[str, Any]:
        """See :class:`Executor`."""
        return self._host.step(self._name)

    def save(self, folder: Path) -> None:
        """See :class:`Executor`."""
        self._host.save(self._name, folder)

    def profile(self) -> dict[str, bytes]:
        """See :class:`Executor`."""
        return self._host.profile(self._name)

    def end(self) -> None:
        """See :class:`Executor`."""
        self._host.end(self._name)
