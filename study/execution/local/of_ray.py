"""The resources of a Ray, for trials that Ray Train places."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from study.execution.engine import EPSILON
from study.execution.local.leases import POLL_SECONDS, Local, OnEvents
from trainers.workers.node import Node

AGAIN_SECONDS = 10.0
"""Seconds after which an autoscaler is told its demand again."""


class OfRay(Local):
    """All resources of a Ray as one lease (:mod:`study.execution.local.leases`), whose processes
    run here; Ray Train places the trials.

    While a trial waits, an autoscaler is asked for what those that run have, and one trial more:
    Ray Train is given trials that fit only, so that Ray itself never hears of those that wait.

    Args:
        node: node that runs the processes.
        on_events: called with the processes' messages, from a thread.
        resources: returns the resources of the Ray.
        unit: CPUs and GPUs of the largest worker.
        workers: number of workers of the largest trial.
        ask: asks the Ray's autoscaler for so many workers' resources in all; None if it has none.
    """

    def __init__(
        self,
        node: Node,
        on_events: OnEvents,
        resources: Callable[[], dict[str, float]],
        unit: tuple[float, float] = (1.0, 0.0),
        workers: int = 1,
        ask: Callable[[list[dict[str, float]]], None] | None = None,
    ) -> None:
        super().__init__(0.0, [], node, on_events)
        self._resources, self._ask, self._unit, self._workers = resources, ask, unit, workers
        self._asked, self._asked_for, self._demanded = -math.inf, -1, 0.0
        self.poll(False)

    def poll(self, waiting: bool) -> None:
        """Update the resources to what Ray has now."""
        if time.monotonic() - self._asked < POLL_SECONDS:
            return
        self._asked = time.monotonic()
        have, (lease,) = self._resources(), self.leases
        lease.free += have.get("CPU", 0.0) - lease.cpus
        lease.cpus = have.get("CPU", 0.0)
        gpus = int(have.get("GPU", 0.0))
        lease.gpus += [1.0] * (gpus - len(lease.gpus))
        lease.lost = len(lease.gpus) - gpus
        used = math.ceil((lease.cpus - lease.free) / self._unit[0] - EPSILON)
        self._ask_for(used + self._workers if waiting else 0)

    def close(self) -> None:
        """Take the demand back and end the processes."""
        self._ask_for(0)
        super().close()

    def _ask_for(self, workers: int) -> None:
        """Replace the demand that the autoscaler knows, if it is another, be it one of a driver
        that was killed; tell it again now and then, as another study's replaces it."""
        again = workers > 0 and time.monotonic() - self._demanded > AGAIN_SECONDS
        if self._ask is None or (workers == self._asked_for and not again):
            return
        self._asked_for, self._demanded = workers, time.monotonic()
        cpus, gpus = self._unit
        demand = [{"CPU": cpus} | ({"GPU": gpus} if gpus else {})] * workers
        # a control store that has died does not answer, and nothing should wait for it
        thread = threading.Thread(target=self._ask, args=(demand,), daemon=True, name="demand")
        thread.start()
        thread.join(POLL_SECONDS)
